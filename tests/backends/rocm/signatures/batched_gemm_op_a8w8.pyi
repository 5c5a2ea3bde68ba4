"""The signature of aiter's grouped product of MXFP8, which no wheel on PyPI has (amd-aiter 0.1.7.post2.dev18 is older).

Names, kinds and defaults, copied by hand. Not part of this package's code: what calls are bound to in tests.

repository: https://github.com/ROCm/aiter
file: aiter/ops/batched_gemm_op_a8w8.py
commit: 81854927797a35962768344659812c654cb19049
read: 2026-12-02
"""

import torch
from torch import Tensor

def batched_gemm_a8w8_mxscale_bpreshuffle(
    x: Tensor,
    wo_a: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = dtypes.bf16,  # noqa: F821
) -> Tensor: ...
