"""Our CUDA C++ kernels compiled ahead of time, without a GPU, and what a configuration can meet on FlashMLA's backend.

`python -m dsv41.backends.cuda.aot` is a worker that answers as `backends/portable/aot.py` does. Its payloads are of two
forms: those of that module for Triton's kernels, and "ours:0" for the first of our CUDA C++ kernels.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import triton
from torch import Tensor
from triton import knobs

from dsv41.backends.cuda import hopper, index, nvrtc, products, products_wide
from dsv41.backends.cuda.build import ARCH, TARGET, Build
from dsv41.backends.cuda.choice import HOPPER, Choice
from dsv41.backends.cuda.flashmla import FlashMLABackend
from dsv41.backends.portable import aot, variants
from dsv41.errors import BackendError

BUILDS: tuple[Build, ...] = (*hopper.BUILDS, *index.BUILDS, *products.BUILDS, *products_wide.ALL_BUILDS)
_PREFIX = "ours:"
_MATRIX = re.compile(r"\b[HIQ]G?MMA\.")


class DryFlashMLA(FlashMLABackend):
    """On no device: it launches what the backend would on `target`, but calls neither the library nor CUDA C++."""

    def __init__(self, target: str, **options: Any) -> None:
        self.target = target
        super().__init__(**options)

    def read_choice(self) -> Choice:
        return Choice.read(self.target, nvrtc.missing() if self.target == TARGET else f"it is built for {TARGET}")

    @cached_property
    def library(self) -> Any:
        return SimpleNamespace(
            get_mla_metadata=lambda: (None, None), flash_mla_with_kvcache=_written, flash_mla_sparse_fwd=_written
        )

    def attend_on_hopper(self, *arguments: Any) -> None:
        arguments[-1].rotated_back = False

    def multiply_on_hopper(self, *arguments: Any) -> None:
        """Its result is already there."""

    def score_on_hopper(self, *arguments: Any) -> None:
        """So are scores."""

    def choose_on_hopper(
        self, scores: Tensor, best: Tensor | None, visible: Tensor, candidates: Tensor | None, rows: int, blocks: int
    ) -> tuple[Tensor, Tensor]:
        return visible.new_empty(len(scores), rows), visible.new_empty(len(scores), blocks)


def _written(*, out: Any, **_: Any) -> None:
    """A call that writes its result into `out`."""


def compile_ours(build: Build) -> tuple[aot.Figures, bool]:
    """Compile, or find in the cache, and read the figures; whether it was there. Raises as `nvrtc.cubin` does."""
    kept = nvrtc.kept_at(build.kernel, ARCH, build.defines)
    cached = kept.is_file()
    code = build.cubin()
    registers, spilt = aot.cuda_usage(code)
    command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(kept)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    matrix = len(_MATRIX.findall(assembly))
    return aot.Figures(registers, spilt, build.shared_bytes, matrix, aot.code_bytes(code)), cached


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request, as the module of the portable backend says."""
    if "compile" in request:
        payload = request["compile"]
        if not payload.startswith(_PREFIX):
            return aot.answer(request)
        figures, cached = compile_ours(BUILDS[int(payload.removeprefix(_PREFIX))])
        return {"figures": asdict(figures), "cached": cached}
    if "list" in request:
        why = nvrtc.missing() if TARGET in request["list"] else None
        builds = BUILDS if TARGET in request["list"] and why is None else ()
        return {
            "variants": _listed(builds),
            "skipped": {} if why is None else {f"our kernels on {TARGET}": " ".join(why.split())},
            "triton": triton.__version__,
            "cache": str(nvrtc.cache_folder()),
        }
    if request["backend"] != FlashMLABackend.name:
        raise BackendError(
            f"what {request['backend']} can meet is not listed: expected {FlashMLABackend.name}; let the first steps "
            "of others compile what they need"
        )
    return _meet(aot.typed(request["meet"]))


def _meet(meeting: dict[str, Any]) -> dict[str, Any]:
    target = meeting["target"]
    choice = DryFlashMLA(target).choice
    ours = {spec.num_heads for spec in meeting["specs"] if HOPPER in choice.kernels(spec.num_heads)}
    builds: set[Build] = {build for heads in ours for build in hopper.builds_for(heads)}
    if choice.ours:
        builds.update(products.BUILDS + products_wide.ALL_BUILDS)
        if any(spec.owns_selection for spec in meeting["specs"]):
            builds.update(index.BUILDS)
    triton_builds = variants.meet(**meeting, make=partial(DryFlashMLA, target))
    return {
        "variants": [aot.listed(variant) for variant in triton_builds] + _listed(sorted(builds, key=BUILDS.index)),
        "skipped": {},
        "triton": triton.__version__,
        "cache": f"{knobs.cache.dir}, {nvrtc.cache_folder()}",
    }


def _listed(builds: Iterable[Build]) -> list[dict[str, str]]:
    return [
        {
            "name": build.name,
            "target": TARGET,
            "kind": build.kind,
            "payload": f"{_PREFIX}{BUILDS.index(build)}",
        }
        for build in builds
    ]


if __name__ == "__main__":
    aot.serve(answer)
