"""The signature of aiter's sparse MLA, which no wheel on PyPI has (the newest, amd-aiter 0.1.7.post2.dev18, is older).

Names, kinds and defaults, copied by hand. Not part of this package's code: what calls are bound to in tests.

repository: https://github.com/ROCm/aiter
file: aiter/ops/triton/attention/sparse_mla.py
commit: 013f408ebe8491e80ddab1fbab4c3dbcbc98bd74
read: 2026-12-02
"""

from torch import Tensor

def sparse_mla_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    softmax_scale: float,
    *,
    kv_scale: Tensor | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    kv_splits: int | None = None,
    skip_reduce: bool = False,
    has_invalid: bool = False,
    dot_precision: str = "bf16",
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    attn_sink: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_kv_scale: Tensor | None = None,
    inv_rope_positions: Tensor | None = None,
    inv_rope_cos_sin_cache: Tensor | None = None,
    out_mxfp8: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]: ...
