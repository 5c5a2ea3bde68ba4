"""Named capabilities that clauses require, and how a subject is asked for them. None is a backend's name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv41.errors import Dsv41Error
from dsv41.hal.select import explain_backends
from dsv41.testing.case import Case
from dsv41.testing.clause import Inapplicable
from dsv41.testing.subject import Subject

GRAPH_CAPTURE = "graph_capture"
CAPTURING_DEVICE = "capturing_device"
FLOAT32 = "float32_activations"
UNQUANTISED = "unquantised_records"
WINDOW_REPLAY = "window_replay"
DRAFT_BLOCKS = "draft_blocks"
LARGE_MEMORY = "large_memory"
QUANTISED_ACTIVATIONS = "quantised_activations"

_LARGE = 12 << 30


def _graph_capture(subject: Subject) -> str | None:
    return None if subject.plain.supports_graph_capture else "it does not declare supports_graph_capture"


def _capturing_device(subject: Subject) -> str | None:
    return None if subject.device.type == "cuda" else f"no graph can be captured on {subject.device}"


def _float32(subject: Subject) -> str | None:
    """By asking it for a step of one token."""
    from dsv41.testing.scene import Scene

    try:
        scene = Scene(subject, Case(heads=subject.default_heads, requests=((0, 1),), layer="window", dtype="float32"))
        mine = scene.mine
        mine.backend.attend(scene.inputs(mine), mine.state, mine.plan, None)
    except (Dsv41Error, Inapplicable) as error:
        return f"it refuses float32 activations: {error}"
    except Exception:
        return None  # it takes them, and a clause will say what is wrong
    return None


def _unquantised(subject: Subject) -> str | None:
    return None if "float32" in subject.kv_cache_dtypes else "it reads no float32 records"


def _window_replay(subject: Subject) -> str | None:
    return None if subject.plain.replays_window else "it does not declare replays_window"


def _draft_blocks(subject: Subject) -> str | None:
    if subject.spec is None or subject.notes:
        return None
    report = explain_backends(subject.name, device=str(subject.device), phases=("draft",))
    candidate = report.candidate(subject.name)
    reasons = [reason.text for reason in candidate.reasons if reason.cls == "phase"]
    return "; ".join(reasons) or None


def _large_memory(subject: Subject) -> str | None:
    if subject.device.type != "cuda":
        return None  # memory that nothing touches costs nothing there
    free, _ = torch.cuda.mem_get_info(subject.device)
    return None if free >= _LARGE else f"{free >> 20} MiB are free on {subject.device}, {_LARGE >> 20} are needed"


def _nothing(subject: Subject) -> str | None:
    return None


CAPABILITIES: dict[str, tuple[str, Callable[[Subject], str | None]]] = {
    GRAPH_CAPTURE: ("declares `supports_graph_capture`", _graph_capture),
    CAPTURING_DEVICE: ("runs on a device that captures graphs", _capturing_device),
    FLOAT32: ("takes activations in float32", _float32),
    UNQUANTISED: ("reads float32 records", _unquantised),
    WINDOW_REPLAY: ("declares `replays_window`", _window_replay),
    DRAFT_BLOCKS: ("serves the draft phase", _draft_blocks),
    QUANTISED_ACTIVATIONS: ("rounds the inputs of fp8 projections to MXFP8 where a layer asks for it", _nothing),
    LARGE_MEMORY: ("runs on a device with 12 GiB of memory free", _large_memory),
}
"""What each means, and what finds out: None where it is there, or the reason why it is not."""


def missing(subject: Subject, names: tuple[str, ...]) -> str | None:
    """Why one of these capabilities is not there; None where all are."""
    for name in names:
        if name in subject.unsupported:
            return f"the port declares {name} unsupported: {subject.unsupported[name]}"
        if name not in subject.answers:
            subject.answers[name] = CAPABILITIES[name][1](subject)
        if reason := subject.answers[name]:
            return f"{name}: {reason}"
    return None
