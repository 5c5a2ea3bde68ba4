"""Caches of both fp8 dialects in one layer, as on gfx942, whose matrix cores are FNUZ while checkpoints are OCP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68, NVFP4_288, Dialect, Record, plain_fp8, v4_584, v41_528
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ...model.portables import DEVICE, Interpreted
from ...model.toys import MAX_LEN, TOY, noise

OCP, FNUZ = Dialect.OCP, Dialect.FNUZ
LAYERS = [4]
"""A source of ratio 1, which writes and reads all three caches."""


def _layout(record: Record) -> CacheLayout:
    return CacheLayout(record, 64, ScalePlacement.PAGE if record.scale_bytes else ScalePlacement.NONE)


class InRecords:
    """A backend over a window and compressed rows in any records."""

    def __init__(self, window: Record, compressed: Record, **options: Any) -> None:
        self.records = window, compressed
        super().__init__(**options)

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return "mixed", "mxfp4", CacheLayouts(*map(_layout, self.records), _layout(INDEX_MXFP4_68))


class Kernels(InRecords, PortableBackend):
    """The kernels; on a CPU in Triton's interpreter, but for products, which take it minutes."""

    if DEVICE == "cpu":
        _product = Interpreted._product
        o_proj = Interpreted.o_proj


class Attends(InRecords, Interpreted):
    """The same with attention by torch."""


class Plain(InRecords, ReferenceBackend):
    pass


def made(kind: Any, window: Record, compressed: Record) -> Any:
    return kind(window, compressed, device=DEVICE, facts=Device.gpu("gfx942"))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dialects") / "toy", config=TOY)


TOKENS = 9
"""Of a prefill; a decode step follows."""


def outputs(backend: Any, path: Path, relabel: Record | None = None, loud: float = 1.0) -> Tensor:
    """A prefill and a decode step of a layer, past the window and the top-k: `[1, T, hidden]`.

    `relabel` calls the window's bytes by the name of another record before the decode step, whose output alone is
    returned then. `loud` multiplies the latents of the window.
    """
    checkpoint = load_checkpoint(path, layers=LAYERS, device=DEVICE, dtype=torch.bfloat16)
    weights = {layer: replace(own, kv_norm=own.kv_norm * loud) for layer, own in checkpoint.weights.items()}
    stack = AttentionStack(replace(checkpoint, weights=weights), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1, max_step_tokens=16, page_size=16)
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed):
            if cache is not None and cache.tensor_scale is not None:
                # A code is worth half in FNUZ.
                cache.tensor_scale.fill_(2.0**-4 if cache.layout.record.dialect is FNUZ else 2.0**-5)
    request = session.add_request()
    hidden = noise(1, TOKENS + 1, TOY.hidden_size, seed=3).to(DEVICE, torch.bfloat16)
    found = [session.step({request: hidden[:, :TOKENS]})[request]]
    if relabel is not None:
        for layer, caches in session.caches.items():
            old = caches.window
            window = PagedCache(replace(old.layout, record=relabel), old.data, tensor_scale=old.tensor_scale)
            session.caches[layer] = replace(caches, window=window)
        stack.bind(session.caches)
        found.clear()
    return torch.cat([*found, session.step({request: hidden[:, TOKENS:]})[request]], dim=1)


_IN_OCP = {make(FNUZ): make(OCP) for make in (v41_528, v4_584, plain_fp8)}


@pytest.mark.parametrize(
    ("kind", "window", "compressed"),
    [
        (Kernels, v41_528(FNUZ), v41_528(OCP)),
        (Attends, v41_528(FNUZ), NVFP4_288),
        (Attends, v4_584(FNUZ), v4_584(OCP)),
        (Attends, v4_584(OCP), v4_584(FNUZ)),
        (Attends, plain_fp8(FNUZ), plain_fp8(OCP)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value.name,
)
def test_caches_of_both_dialects_meet_in_one_layer(path: Path, kind: Any, window: Record, compressed: Record) -> None:
    """Beside the reference in the same records, and in those of a machine that has OCP alone."""
    found = outputs(made(kind, window, compressed), path)
    assert relative_error(found, outputs(made(Plain, window, compressed), path)) < 4e-3
    elsewhere = outputs(made(Plain, *(_IN_OCP.get(record, record) for record in (window, compressed))), path)
    assert relative_error(found, elsewhere) < 2e-2


@pytest.mark.parametrize(
    ("window", "loud", "finite"),
    [
        # A group's largest number is often 240 steps, whose code is NaN in OCP.
        (v41_528(FNUZ), 1.0, False),
        # Without it all numbers are the double.
        (plain_fp8(FNUZ), 0.25, True),
    ],
    ids=lambda value: value.name if isinstance(value, Record) else str(value),
)
def test_a_dialect_taken_for_the_other_is_far_beyond_those_bounds(
    path: Path, window: Record, loud: float, finite: bool
) -> None:
    right = outputs(made(Attends, window, v41_528(OCP)), path, loud=loud)[:, TOKENS:]
    wrong = outputs(made(Attends, window, v41_528(OCP)), path, loud=loud, relabel=_IN_OCP[window])
    assert bool(wrong.isfinite().all()) == finite
    assert not relative_error(wrong, right) < 0.1


def test_what_fnuz_cannot_hold_is_clamped_and_not_wrapped(path: Path) -> None:
    """Latents past 240 steps, 15, which OCP's scale clamps at 448 of its own, 14."""
    found, expected, clamped = (
        outputs(made(kind, plain_fp8(dialect), v41_528(OCP)), path, loud=8.0)
        for kind, dialect in ((Attends, FNUZ), (Plain, FNUZ), (Plain, OCP))
    )
    assert found.isfinite().all()
    assert relative_error(found, expected) < 4e-3
    assert relative_error(found, clamped) < 0.1
