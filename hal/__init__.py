"""The contract between the model and its kernels: what crosses it, what a backend declares, how one is picked.

Importing this package alone imports no torch: the names below are loaded when they are first used.
"""
# ruff: noqa: F401  (what type checkers read is what __getattr__ loads)

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "dsv41.hal.backend": ("CONTRACT_VERSION", "AttentionBackend"),
    "dsv41.hal.codecs": ("Dialect", "Encoding", "ScaleFormat"),
    "dsv41.hal.device": ("Device", "Library", "Platform", "TorchBuild", "platform_names"),
    "dsv41.hal.layout": ("CacheLayout", "CacheLayouts", "PagedCache", "ScalePlacement"),
    "dsv41.hal.probe": ("deep_check",),
    "dsv41.hal.records": ("RECORDS", "Record", "pack", "unpack"),
    "dsv41.hal.registry": ("BackendSpec", "all_specs", "register", "unregister"),
    "dsv41.hal.report": ("Candidate", "SelectionReport"),
    "dsv41.hal.request": ("Reason", "Request"),
    "dsv41.hal.select": ("SlowBackendWarning", "explain_backends", "select_backend"),
    "dsv41.hal.transcode": ("TranscodeReport",),
    "dsv41.hal.types": (
        "AttnInputs",
        "AttnOutput",
        "BlockScaledWeight",
        "BlockTable",
        "CompressorWeights",
        "ForwardBatch",
        "Geometry",
        "IndexerWeights",
        "LayerCaches",
        "LayerSpec",
        "LayerState",
        "LayerWeights",
        "Selection",
        "StepPlan",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)

if TYPE_CHECKING:
    from dsv41.hal.backend import CONTRACT_VERSION, AttentionBackend
    from dsv41.hal.codecs import Dialect, Encoding, ScaleFormat
    from dsv41.hal.device import Device, Library, Platform, TorchBuild, platform_names
    from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
    from dsv41.hal.probe import deep_check
    from dsv41.hal.records import RECORDS, Record, pack, unpack
    from dsv41.hal.registry import BackendSpec, all_specs, register, unregister
    from dsv41.hal.report import Candidate, SelectionReport
    from dsv41.hal.request import Reason, Request
    from dsv41.hal.select import SlowBackendWarning, explain_backends, select_backend
    from dsv41.hal.transcode import TranscodeReport
    from dsv41.hal.types import (
        AttnInputs,
        AttnOutput,
        BlockScaledWeight,
        BlockTable,
        CompressorWeights,
        ForwardBatch,
        Geometry,
        IndexerWeights,
        LayerCaches,
        LayerSpec,
        LayerState,
        LayerWeights,
        Selection,
        StepPlan,
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dsv41.hal' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
