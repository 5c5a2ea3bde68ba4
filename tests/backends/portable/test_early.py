"""Kernels that begin early: which do and where, that each waits before it touches memory, and the same bits."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.cuda.overlap import Overlapping
from dsv41.backends.portable import early
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.early import launches_early
from dsv41.checkpoint import load_checkpoint
from dsv41.hal.arch import ARCHS
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config

from .common import noise
from .test_variants import facts

BACKENDS = Path(__file__).parents[3] / "backends"
WAIT = "wait_for_launch_ahead(EARLY)"


def kernels() -> dict[str, ast.FunctionDef]:
    """By name, those of the backends that have the constant."""
    trees = (ast.parse(path.read_text()) for path in BACKENDS.rglob("*.py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    named = {node.name: node for node in functions if "EARLY" in {argument.arg for argument in node.args.args}}
    del named["wait_for_launch_ahead"]
    return named


def test_from_sm90_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {arch for arch in (*ARCHS, "cpu") if launches_early(arch)}
    assert found == {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}
    monkeypatch.setattr(early, "EARLY_LAUNCH", False)
    assert not any(launches_early(arch) for arch in ARCHS)


def test_a_kernel_that_takes_part_waits_before_anything_else() -> None:
    for name, kernel in kernels().items():
        body = kernel.body[ast.get_docstring(kernel) is not None :]
        assert ast.unparse(body[0]) == WAIT, name


def test_every_launch_of_a_step_takes_part_but_the_one_behind_attention() -> None:
    """Which on Hopper may be FlashMLA's. Elsewhere nothing does."""
    found = facts("early")
    assert set(found) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for target, launches in found.items():
        assert set(launches) == set(kernels()), target
        takes = launches_early(target)
        for name, launch in launches.items():
            assert launch == {"waits": takes, "overlaps": takes and name != "_finish_output"}, (target, name)


def test_machine_code_waits_before_it_touches_memory() -> None:
    """In PTX, which keeps its order; on SM80 there is nothing to wait for."""
    found = facts("waits")
    assert {name.split()[0] for name in found["sm_90"]} == {name.lstrip("_") for name in kernels()}
    for name, first in found["sm_90"].items():
        begin, wait, touched = first
        assert (begin, wait) == ("griddepcontrol.launch_dependents", "griddepcontrol.wait"), name
        assert touched.endswith(".global"), name
    assert found["sm_80"]
    assert all(operation.endswith(".global") for first in found["sm_80"].values() for operation in first)


class Forked(Overlapping):
    max_tokens_for_overlap = 32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [PortableBackend, Forked])
def test_captured_steps_give_the_same_bits(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launches that wait for one another whole, in a chain and in branches, step after step over the same caches."""
    path = make_checkpoint(tmp_path / "small", config=small_config())
    stack = AttentionStack(load_checkpoint(path, device="cuda"), kind(device="cuda"), max_len=2048)
    hidden = noise(200, stack.config.hidden_size).bfloat16()
    outputs, caches = [], []
    for on in (False, True):
        monkeypatch.setattr(early, "EARLY_LAUNCH", on)
        session = Session(stack, max_requests=2, max_tokens=512, max_step_tokens=64)
        session.capture(2, num_requests=2)
        requests = [session.add_request() for _ in range(2)]
        session.step(dict.fromkeys(requests, hidden[:32]))
        rows = [session.step(dict.fromkeys(requests, row[None]))[requests[1]] for row in hidden[32:]]
        outputs.append(torch.cat(rows))
        parts = (getattr(own, kind) for own in session.caches.values() for kind in ("window", "compressed", "index"))
        caches.append([cache.data.clone() for cache in parts if cache is not None])
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)
    assert all(torch.equal(plain, early) for plain, early in zip(*caches, strict=True))
