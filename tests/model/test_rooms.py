"""The rule: the model -> hal <- backends. They meet in the registry and import each other nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = {"dsv41": "dsv41", "hal": "dsv41.hal", "backends": "dsv41.backends"}
FILES = [path for room in PACKAGE for path in sorted((ROOT / room).rglob("*.py"))]
# Which of our own modules a room may import.
ALLOWED = {
    "hal": ("dsv41.errors", "dsv41.hal", "dsv41.__version__"),
    "backends": ("dsv41.errors", "dsv41.hal", "dsv41.backends"),
}
KERNELS = ("triton", "flash_mla", "flashinfer", "aiter", "hip", "cuda", "amdsmi")
FORMATS = ("safetensors", "click", "rich")


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Every module or name that a source imports, wherever it stands, with relative imports resolved; also the
    arguments of `import_module` and `__import__` where they are plain strings."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = parts[: len(parts) - up] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports that break the rule."""
    room = next((r for r in ("backends", "hal") if within(module, PACKAGE[r])), "dsv41")
    found = list(imports(source, module, is_package=is_package))
    ours = [name for name in found if within(name, "dsv41")]
    if room == "dsv41":
        wrong = [name for name in ours if within(name, "dsv41.backends")]
        return wrong + [name for name in found if within(name, *KERNELS)]
    wrong = [name for name in ours if not within(name, *ALLOWED[room])]
    if room == "hal":
        return wrong + [name for name in found if within(name, *KERNELS, *FORMATS)]
    # Another backend is known by its public classes; vendors know nothing of each other.
    mine = module.split(".")[2] if module.count(".") >= 2 else ""
    for name in ours:
        other = [*name.split("."), "", ""][2:]
        if within(name, "dsv41.backends") and other[0] != mine:
            private = any(part.startswith("_") for part in other)
            vendors = mine in ("cuda", "rocm") and other[0] in ("cuda", "rocm")
            below = mine in ("reference", "portable") and other[0] not in ("reference", "")
            if private or vendors or below:
                wrong.append(name)
    return wrong


def module_of(path: Path) -> str:
    room, *inside = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGE[room], *(part for part in inside if part != "__init__")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_keeps_to_its_room(path: Path) -> None:
    assert offences(path.read_text(), module_of(path), is_package=path.name == "__init__.py") == []


def test_there_are_modules_in_every_room() -> None:
    for room in PACKAGE:
        assert sum(path.relative_to(ROOT).parts[0] == room for path in FILES) > 5


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsv41.stack", "from dsv41.backends.reference.backend import ReferenceBackend"),
        ("dsv41.stack", "import dsv41.backends.reference as r"),
        ("dsv41.stack", "from dsv41 import backends"),
        ("dsv41.stack", "from .backends import reference"),
        ("dsv41.stack", "def f():\n    from importlib import import_module\n    import_module('dsv41.backends.cuda')"),
        ("dsv41.stack", "try:\n    import triton.language as tl\nexcept ImportError: pass"),
        ("dsv41.hal.types", "from dsv41.config import DeepseekV41Config"),
        ("dsv41.hal.types", "if TYPE_CHECKING:\n    from dsv41 import session"),
        ("dsv41.hal.types", "from ..checkpoint import load_checkpoint"),
        ("dsv41.hal.builtin", "from dsv41.backends.reference.backend import ReferenceBackend"),
        ("dsv41.hal.probe", "import triton"),
        ("dsv41.hal.layout", "from safetensors import safe_open"),
        ("dsv41.backends.reference.backend", "from dsv41.rope import cos_sin_table"),
        ("dsv41.backends.reference.backend", "from dsv41.backends.portable import kernels"),
        ("dsv41.backends.cuda.flashmla", "from dsv41.backends.rocm.aiter import AiterBackend"),
        ("dsv41.backends.cuda.flashmla", "from dsv41.backends.reference.linear import _ELEMENTS_AT_ONCE"),
        ("dsv41.backends.cuda.flashmla", "from dsv41.topology import role"),
    ],
)
def test_what_breaks_the_rule_is_found(module: str, source: str) -> None:
    assert offences(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsv41.stack", "import torch\nfrom dsv41.hal.backend import AttentionBackend"),
        (
            "dsv41.hal.types",
            "from dsv41.errors import InputError\nfrom dsv41.hal.layout import PagedCache\nimport torch",
        ),
        ("dsv41.backends.reference.backend", "from dsv41.backends.reference import _private\nimport torch"),
        (
            "dsv41.backends.cuda.flashmla",
            "import flash_mla\nfrom dsv41.backends.reference.backend import ReferenceBackend",
        ),
    ],
)
def test_what_keeps_to_the_rule_is_not(module: str, source: str) -> None:
    assert offences(source, module) == []
