"""DeepSeek-V4.1 sparse multi-latent attention on any machine.

Importing this package imports neither torch nor a vendor library and asks no device anything: the names below
are loaded when they are first used.
"""
# ruff: noqa: F401  (what type checkers read is what __getattr__ loads)

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AttentionStack": "dsv41.stack",
    "CapturedStep": "dsv41.graph",
    "DeepseekV41Attention": "dsv41.attention",
    "DeepseekV41Config": "dsv41.config",
    "Session": "dsv41.session",
    "errors": "dsv41.errors",
    "explain_backends": "dsv41.hal.select",
    "hal": "dsv41.hal",
    "load_checkpoint": "dsv41.checkpoint",
    "make_checkpoint": "dsv41.synthetic",
    "probe": "dsv41.hal.probe",
    "select_backend": "dsv41.hal.select",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from dsv41 import errors, hal
    from dsv41.attention import DeepseekV41Attention
    from dsv41.checkpoint import load_checkpoint
    from dsv41.config import DeepseekV41Config
    from dsv41.graph import CapturedStep
    from dsv41.hal.probe import probe
    from dsv41.hal.select import explain_backends, select_backend
    from dsv41.session import Session
    from dsv41.stack import AttentionStack
    from dsv41.synthetic import make_checkpoint

if find_spec("dsv41.hal") is None:
    raise ImportError(
        f"dsv41 was imported from {__path__[0]}, which holds no dsv41.hal: the repository root shadows an installed "
        "wheel. Run from another directory, or install the checkout with `pip install -e .`."
    )


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dsv41' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    module = import_module(home)
    value = module if home == f"dsv41.{name}" and name in {"errors", "hal"} else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
