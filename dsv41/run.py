"""The main job: load a checkpoint, prefill in chunks, decode, and say whether it was right."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41.attention import Tap
from dsv41.borders import settle_window_rows
from dsv41.cache import bytes_per_token
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import CheckpointError, InputError
from dsv41.golden import Golden, GoldenTap, compare_outputs
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.records import INDEX_MXFP4_68, NVFP4_288, Dialect, v41_528
from dsv41.hal.select import select_backend
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.topology import role
from dsv41.verify import Comparison, Trace, compare_with_reference

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class RunOptions:
    """What to run; the names are those of the command line. `prompt` None = 64 tokens, or all golden ones."""

    checkpoint: Path
    prompt: int | None = None
    decode: int = 16
    requests: int = 1
    chunk: int = 256
    layers: tuple[int, ...] | None = None
    backend: str | None = None
    device: str | None = None
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    quantize_activations: bool = False
    verify: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("decode", 0), ("requests", 1), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}: expected at least {least}")


@dataclass
class RunReport:
    """What a run did. `failures` is empty where nothing was to be verified or all of it was right."""

    backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    index_cache_dtype: str
    layers: dict[int, str]
    cache_bytes_per_token: dict[str, float]
    weight_bytes: int
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    peak_memory_bytes: int = 0
    verify: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def run(options: RunOptions, progress: Progress = lambda *_: None) -> RunReport:
    """Run and, if asked, verify. Raises a Dsv41Error for anything that cannot be used."""
    checkpoint, backend = _load(options)
    golden = _find_golden(options, checkpoint, backend.device)
    prompt = options.prompt or (golden.tokens if golden is not None else 64)
    tokens = prompt + options.decode
    stack = AttentionStack(checkpoint, backend, max_len=tokens, quantize_activations=options.quantize_activations)
    tap: Trace | None = None
    if golden is not None and _in_release_records(backend):
        progress("settling rounding borders", 0, 1)
        tap = GoldenTap(golden, stack, settle_window_rows(stack, golden))
    elif options.verify:
        tap = Trace()
    session = Session(
        stack,
        max_requests=options.requests,
        max_tokens=options.requests * tokens,
        max_step_tokens=options.requests * min(options.chunk, tokens),
        max_draft=0,
    )
    report = RunReport(
        backend=backend.name,
        device=backend.facts.key if backend.facts else str(backend.device),
        dtype=str(stack.dtype).removeprefix("torch."),
        kv_cache_dtype=backend.kv_cache_dtype,
        index_cache_dtype=backend.index_cache_dtype,
        layers={spec.layer_id: role(spec) for spec in stack.specs},
        cache_bytes_per_token=_with_total(bytes_per_token(session.cache_specs)),
        weight_bytes=checkpoint.bytes_read,
        prefill_tokens=prompt * options.requests,
        decode_tokens=options.decode * options.requests,
    )
    _serve(session, _make_inputs(options, stack, golden, tokens), prompt, options.chunk, tap, report, progress)
    report.peak_memory_bytes = _peak_memory(backend.device)
    if tap is not None:
        progress("comparing with the reference", 0, 1)
        _verify(options, checkpoint, stack, tap, golden, report)
    return report


def _load(options: RunOptions) -> tuple[Checkpoint, AttentionBackend]:
    """The backend is asked first, since it answers before any weight is touched."""
    config = DeepseekV41Config.from_json(options.checkpoint / "config.json")
    backend = select_backend(
        options.backend,
        device=options.device,
        config=config,
        kv_cache_dtype=options.kv_cache_dtype,
        index_cache_dtype=options.index_cache_dtype,
    )
    checkpoint = load_checkpoint(options.checkpoint, layers=options.layers, device=backend.device)
    if options.verify and (found := checkpoint.find_nan()):
        listed = ", ".join(f"{name} ({count})" for name, count in found)
        raise CheckpointError(f"weights hold NaN: {listed}; expected finite numbers, fetch these shards again")
    return checkpoint, backend


def _find_golden(options: RunOptions, checkpoint: Checkpoint, device: torch.device) -> Golden | None:
    path = options.checkpoint / "io.safetensors"
    if not options.verify or not path.exists():
        return None
    golden = Golden(path, checkpoint.specs, device)
    if options.prompt is not None and options.prompt > golden.tokens:
        raise InputError(
            f"prompt is {options.prompt}: expected at most {golden.tokens}, the tokens of {path}, whose inputs are the "
            "prompt; give fewer, or leave --verify out"
        )
    return golden


def _make_inputs(options: RunOptions, stack: AttentionStack, golden: Golden | None, tokens: int) -> list[Tensor]:
    """Hidden states of each request, ordinary noise: for the first layer, or, where the first request is the golden
    one, for each layer. The others' differ, so that one that reads another's pages shows."""
    generator = torch.Generator().manual_seed(options.seed % 2**63)
    shape = [tokens, stack.config.hidden_size]
    if golden is not None:
        shape = [len(stack.layers), *shape]
    device = stack.backend.device
    inputs = [torch.randn(shape, generator=generator).to(device, stack.dtype) for _ in range(options.requests)]
    if golden is not None:
        known = golden.inputs[:, :tokens]
        inputs[0][:, : known.shape[1]] = known
    return inputs


def _serve(
    session: Session,
    inputs: list[Tensor],
    prompt: int,
    chunk: int,
    tap: Tap | None,
    report: RunReport,
    progress: Progress,
) -> None:
    requests = [session.add_request() for _ in inputs]
    total = inputs[0].shape[-2]

    def serve(start: int, stop: int, size: int, what: str) -> float | None:
        began = time.perf_counter()
        for first in range(start, stop, size):
            progress(what, first - start, stop - start)
            last = min(first + size, stop)
            session.step({r: hidden[..., first:last, :] for r, hidden in zip(requests, inputs, strict=True)}, tap=tap)
        if session.stack.backend.device.type == "cuda":
            torch.cuda.synchronize(session.stack.backend.device)
        progress(what, stop - start, stop - start)
        return (stop - start) * len(requests) / (time.perf_counter() - began) if stop > start else None

    report.prefill_tokens_per_second = serve(0, prompt, chunk, "prefill")
    report.decode_tokens_per_second = serve(prompt, total, 1, "decode")


def _verify(
    options: RunOptions,
    checkpoint: Checkpoint,
    stack: AttentionStack,
    tap: Trace,
    golden: Golden | None,
    report: RunReport,
) -> None:
    reference = compare_with_reference(
        checkpoint,
        stack.backend,
        tap,
        options.requests,
        prompt=report.prefill_tokens // options.requests,
        quantize_activations=options.quantize_activations,
    )
    report.failures += reference.failures
    report.verify = {"reference": _as_json(reference)}
    if isinstance(tap, GoldenTap):
        found: Comparison = tap.finish()
        report.failures += found.failures
        report.verify["golden"] = _as_json(found) | {"judged": True}
    elif golden is not None:
        found = Comparison()
        compare_outputs(tap, golden, stack.specs, found)
        report.verify["golden"] = _as_json(found) | {"judged": False}


def _as_json(comparison: Comparison) -> dict[str, Any]:
    data = asdict(comparison)
    del data["failures"]
    # JSON has no NaN.
    data["layers"] = {layer: error if math.isfinite(error) else None for layer, error in data["layers"].items()}
    if not math.isfinite(data["max_relative_error"]):
        data["max_relative_error"] = None
    return data


def _in_release_records(backend: AttentionBackend) -> bool:
    """Whether the caches hold what the golden run stored, so that its outputs bind."""
    layouts = backend.layouts
    records = (layouts.window.record, layouts.compressed.record, layouts.index.record)
    return records == (v41_528(Dialect.OCP), NVFP4_288, INDEX_MXFP4_68)


def _with_total(parts: dict[str, float]) -> dict[str, float]:
    return {**parts, "total": sum(parts.values())}


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the device's allocator on a GPU, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
