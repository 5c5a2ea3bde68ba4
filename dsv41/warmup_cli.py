"""`dsv41 warmup`: compile what a configuration can meet on this machine, before a step has to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsv41.compile import CompileReport, Progress, compile_met
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, InputError
from dsv41.hal.select import select_backend
from dsv41.topology import layer_specs


@dataclass(frozen=True)
class WarmupOptions:
    """What will run; the names are those of the command line. `source` is a checkpoint folder or a config file."""

    source: Path
    jobs: int | None = None
    backend: str | None = None
    device: str | None = None
    layers: tuple[int, ...] | None = None
    tp_size: int = 1
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    quantize_activations: bool = False
    max_tokens: int = 2048
    max_requests: int = 64
    max_len: int = 65536

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "max_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: expected at least 1; give more")


def warmup(options: WarmupOptions, progress: Progress = lambda *_: None) -> CompileReport:
    """Compile in processes of their own, which share Triton's cache with this machine's later ones.

    Raises BackendError without a GPU that the backend runs on, and as `select_backend` and the config do.
    """
    path = options.source / "config.json" if options.source.is_dir() else options.source
    config = DeepseekV41Config.from_json(path)
    backend = select_backend(
        options.backend,
        device=options.device,
        config=config,
        tp_size=options.tp_size,
        kv_cache_dtype=options.kv_cache_dtype,
        index_cache_dtype=options.index_cache_dtype,
    )
    if backend.facts is None or not backend.facts.is_gpu:
        raise BackendError(
            f"there is nothing to compile for {backend.device}, on which {backend.name} runs here: expected a GPU; "
            "`dsv41 compile --target sm_90` compiles for GPUs that are elsewhere"
        )
    request = what_it_meets(config, options, backend.facts.arch)
    return compile_met(request, backend=backend.name, jobs=options.jobs, progress=progress)


def what_it_meets(config: DeepseekV41Config, options: WarmupOptions, target: str) -> dict[str, Any]:
    """A target, layers and the size of their steps, as the `aot` module of a backend is asked in JSON."""
    specs = layer_specs(config, tp_size=options.tp_size, layers=options.layers)
    coded = config.quantization_config
    return {
        "target": target,
        "specs": [asdict(replace(spec, quantize_activations=options.quantize_activations)) for spec in specs],
        "block": coded and list(coded.weight_block_size),
        "kv_cache_dtype": options.kv_cache_dtype,
        "index_cache_dtype": options.index_cache_dtype,
        "dtype": options.dtype,
        "max_tokens": options.max_tokens,
        "max_requests": options.max_requests,
        "max_len": options.max_len,
    }
