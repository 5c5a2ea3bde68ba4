"""CUDA C++ kernels of ours, loaded on a device and launched on torch's stream."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from dsv41.errors import BackendError

int32, int64, uint32, float32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float
"""Scalar arguments of kernels; a plain int is a pointer."""

_EARLY = "programmatic_stream_serialization"


def pointer(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


class _Stream:
    """torch's stream, as cuda.core takes those of others."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Kernel:
    """The function `name` of `cubin`, on one device, with `threads` and `shared_bytes` of dynamic memory in a CTA.

    Raises BackendError where the device cannot give a CTA so much.
    """

    def __init__(self, name: str, cubin: bytes, device: int, threads: int, shared_bytes: int) -> None:
        from cuda.bindings import driver
        from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, ObjectCode, launch

        self._config, self._launch = LaunchConfig, launch
        self._shape: dict[str, Any] = {"block": threads, "shmem_size": shared_bytes}
        self._any_stream = LEGACY_DEFAULT_STREAM
        self._kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
        names = driver.CUfunction_attribute
        for attribute, value in (
            (names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            (status,) = driver.cuKernelSetAttribute(attribute, value, int(self._kernel.handle), device)
            if int(status):
                raise BackendError(
                    f"{name} cannot be given {attribute.name} {value} ({status.name}): expected a Hopper GPU"
                )
        self.multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count

    def most_clusters(self, ranks: int) -> int:
        """Whole clusters of `ranks` CTAs that run at a time. Each must fit in a part of the GPU, so it is no
        division."""
        config = self._config(grid=1, cluster=ranks, **self._shape)
        return int(self._kernel.occupancy.max_active_clusters(config, stream=self._any_stream))

    def launch(
        self,
        device: torch.device,
        grid: int | tuple[int, int, int],
        *arguments: Any,
        ranks: int = 1,
        block: tuple[int, int, int] | None = None,
        shared_bytes: int | None = None,
        early: bool = False,
    ) -> None:
        """On torch's current stream of `device`: `grid` CTAs, or clusters where `ranks` CTAs make one. `block` arranges
        a CTA's threads, or takes fewer; `shared_bytes` are fewer than it may have. `early` begins before the launch
        ahead has ended, where cuda-core can, for kernels that wait for it themselves."""
        shape = self._shape | ({"block": block} if block is not None else {})
        if shared_bytes is not None:
            shape["shmem_size"] = shared_bytes
        if ranks > 1:
            shape["cluster"] = ranks
        if early and hasattr(self._config, _EARLY):
            shape[_EARLY] = True
        config = self._config(grid=grid, **shape)
        self._launch(_Stream(torch.cuda.current_stream(device).cuda_stream), config, self._kernel, *arguments)
