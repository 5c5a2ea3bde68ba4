"""The signature of aiter's paged fp8 logits; that of the newest wheel on PyPI, amd-aiter 0.1.7.post2.dev18, is older.

Names, kinds and defaults, copied by hand. Not part of this package's code: what calls are bound to in tests.

repository: https://github.com/ROCm/aiter
file: aiter/ops/triton/attention/pa_mqa_logits.py
commit: 004ac5df7dab794d7bcd9dc4a112cfb7499cada7
read: 2026-12-02
"""

from torch import Tensor

def deepgemm_fp8_paged_mqa_logits(
    q_fp8: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    out_logits: Tensor,
    context_lens: Tensor,
    kv_indices: Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: Tensor | None = None,
) -> str: ...
