"""The built-in backends: where each runs and what it needs, from the vendors' documents.

Sources: for FlashMLA, the arch lists, assertions and interfaces of the tokenspeed-flashmla builds; for FlashInfer,
`flashinfer.mla` of 0.6.18 to 0.7.4; for aiter, `sparse_mla.py` and the kernels beside it. The expectation that all
this adds up to is typed by hand in `tests/hal/test_select.py`.
"""

from __future__ import annotations

from dataclasses import replace

from dsv41.hal.aiter_ops import product_paths
from dsv41.hal.device import Device, Platform
from dsv41.hal.paths import Path
from dsv41.hal.registry import FALLBACK, BackendSpec
from dsv41.hal.request import UNQUANTISED, V4_RECORD, Request
from dsv41.hal.requirements import (
    arch,
    for_kv,
    heads,
    heads_per_group,
    index_cache_dtype,
    index_width,
    kv_cache_dtype,
    library,
    max_heads,
    nvidia_from,
    on_arch,
    released_head_dims,
    switch,
    torch_build,
    vendor,
    window,
)

CONTRACT = 1

INSTALL_FLASHMLA = "`pip install -U tokenspeed-flashmla` (x86-64 wheels; elsewhere, build FlashMLA from source)"
INSTALL_FLASHINFER = "`pip install -U flashinfer-python`"
INSTALL_AITER = (
    "a build from source, `pip install git+https://github.com/ROCm/aiter` on a ROCm machine (the amd-aiter wheel on "
    "PyPI is older than these kernels)"
)
INSTALL_TRITON = "`pip install -U triton` (a GPU build of torch brings it)"


def _sm100_heads(platform: Platform) -> tuple[int, ...]:
    """FlashInfer takes few heads unpadded since 0.6.14."""
    return (8, 16, 32, 64, 128) if "small-heads" in platform.library("flashinfer").features else (64, 128)


_FLASHMLA_HEADS = heads(64, 128)


def _few_heads_remark(device: Device, platform: Platform, request: Request) -> str | None:
    """On Hopper, heads are padded only where the kernels that take them as they are cannot be compiled."""
    assert _FLASHMLA_HEADS.remark is not None
    padding = _FLASHMLA_HEADS.remark(device, platform, request)
    if padding is None or device.arch != "sm_90" or request.num_heads > 64:
        return padding
    return f"has a kernel for {request.num_heads} heads with cuda-core and NVRTC installed; without them, {padding}"


FLASHMLA_MEGA = BackendSpec(
    name="flashmla-mega",
    summary="FlashMLA's fused rotation, sparse attention, inverse rotation and fp8 cast",
    contract_version=CONTRACT,
    target="dsv41.backends.cuda.flashmla_mega:FlashMLAMegaBackend",
    priority=90,
    kv_cache_dtypes=("nvfp4_ds_mla", "fp8_ds_mla", V4_RECORD),
    packed_kv_cache_dtype="nvfp4_ds_mla",
    libraries=("flash_mla",),
    requirements=(
        arch("sm_100a", "sm_103a", library="flash_mla", upgrade=INSTALL_FLASHMLA),
        library("flash_mla", features={"mega": "builds from 20260910"}, install=INSTALL_FLASHMLA),
        torch_build("CUDA", 13),
        _FLASHMLA_HEADS,
        heads_per_group(8),
        released_head_dims(),
    ),
)

FLASHMLA = BackendSpec(
    name="flashmla",
    summary="FlashMLA sparse decode and prefill over packed records",
    contract_version=CONTRACT,
    target="dsv41.backends.cuda.flashmla:FlashMLABackend",
    priority=80,
    kv_cache_dtypes=("fp8_ds_mla", V4_RECORD),
    packed_kv_cache_dtype="fp8_ds_mla",
    libraries=("flash_mla",),
    requirements=(
        arch("sm_90a", "sm_100f", library="flash_mla", upgrade=INSTALL_FLASHMLA),
        library("flash_mla", features={"record-v4": "builds from 20260429"}, install=INSTALL_FLASHMLA),
        torch_build("CUDA", 13),
        replace(_FLASHMLA_HEADS, remark=_few_heads_remark),
        released_head_dims(),
    ),
)

FLASHINFER_SM120 = BackendSpec(
    name="flashinfer-sm120",
    summary="FlashInfer's sparse MLA for RTX 50, RTX PRO and GB10 over packed records",
    contract_version=CONTRACT,
    target="dsv41.backends.cuda.flashinfer_sm120:FlashInferSM120",
    priority=80,
    kv_cache_dtypes=("fp8_ds_mla", "nvfp4_ds_mla", V4_RECORD),
    packed_kv_cache_dtype="fp8_ds_mla",
    libraries=("flashinfer",),
    requirements=(
        arch("sm_120f"),
        library("flashinfer", features={"sparse-mla": "0.6.18"}, install=INSTALL_FLASHINFER),
        for_kv(
            ("nvfp4_ds_mla",), library("flashinfer", features={"record-nvfp4": "0.7.1"}, install=INSTALL_FLASHINFER)
        ),
        heads(8, 16, 32, 64, 128),
        index_width(128, 192, 256, 512, 1024),
        released_head_dims(),
    ),
)

FLASHINFER_SM100 = BackendSpec(
    name="flashinfer-sm100",
    summary="FlashInfer's trtllm-gen sparse MLA over plain bf16 or fp8 rows",
    contract_version=CONTRACT,
    target="dsv41.backends.cuda.flashinfer_sm100:FlashInferSM100",
    priority=70,
    kv_cache_dtypes=("bfloat16", "fp8_e4m3"),
    packed_kv_cache_dtype="fp8_e4m3",
    libraries=("flashinfer",),
    requirements=(
        arch("sm_100a", "sm_103a", "sm_107a"),
        library("flashinfer", features={"sparse-mla": "0.6.18"}, install=INSTALL_FLASHINFER),
        heads(8, 16, 32, 64, 128, only=_sm100_heads),
        window(128),
        released_head_dims(),
    ),
)

AITER = BackendSpec(
    name="aiter",
    summary="aiter's sparse MLA: packed records in place on gfx950, plain fnuz rows on gfx942",
    contract_version=CONTRACT,
    target="dsv41.backends.rocm.aiter_backend:AiterBackend",
    priority=80,
    kv_cache_dtypes=("fp8_ds_mla", "bfloat16", "fp8_e4m3", V4_RECORD),
    packed_kv_cache_dtype="fp8_ds_mla",
    libraries=("aiter",),
    requirements=(
        arch("gfx942", "gfx950"),
        library("aiter", features={"sparse_mla": "the sources of autumn 2026"}, install=INSTALL_AITER),
        # "auto" is not among them: plain fp8 rows with one scale are coarser than the portable kernels' records.
        on_arch(("gfx942",), kv_cache_dtype("fp8_e4m3", "fp8")),
        # The library takes any number; the kernels around it do not.
        max_heads(128),
        released_head_dims(),
    ),
    paths=(
        Path("attention", "aiter sparse_mla_fwd"),
        Path(
            "rotation of the output",
            "that call",
            (
                arch("gfx950"),
                kv_cache_dtype("fp8_ds_mla", V4_RECORD, "auto", "fp8"),
                library("aiter", features={"mla_epilogue": "the sources of autumn 2026"}, install=INSTALL_AITER),
            ),
        ),
        Path("rotation of the output", "portable kernels"),
        Path("norms and their MXFP8, cache writes", "portable kernels"),
        *product_paths(INSTALL_AITER),
        Path(
            "index scores",
            "aiter deepgemm_fp8_paged_mqa_logits in decode steps, portable kernels in others",
            (
                index_cache_dtype("fp8"),
                library("aiter", features={"paged_mqa_logits": "the sources of summer 2026"}, install=INSTALL_AITER),
            ),
        ),
        Path("index scores", "portable kernels"),
    ),
)

PORTABLE = BackendSpec(
    name="portable",
    summary="Triton kernels for any GPU of either vendor",
    contract_version=CONTRACT,
    target="dsv41.backends.portable.backend:PortableBackend",
    priority=10,
    kv_cache_dtypes=("nvfp4_ds_mla", "fp8_ds_mla", "bfloat16", "fp8_e4m3", V4_RECORD, UNQUANTISED),
    packed_kv_cache_dtype="nvfp4_ds_mla",
    index_cache_dtypes=("mxfp4", "fp8", UNQUANTISED),
    libraries=("triton",),
    requirements=(
        vendor("nvidia", "amd"),
        nvidia_from("sm_80", because="which is the oldest that Triton compiles for"),
        library("triton", min_version="3.6", install=INSTALL_TRITON),
        switch("TRITON_INTERPRET", "1", because="runs every Triton kernel in Python"),
        max_heads(128),
    ),
)

REFERENCE = BackendSpec(
    name=FALLBACK,
    summary="plain torch on any device, written for reading and for checking the others",
    contract_version=CONTRACT,
    target="dsv41.backends.reference.backend:ReferenceBackend",
    priority=0,
    kv_cache_dtypes=("nvfp4_ds_mla", "fp8_ds_mla", "bfloat16", "fp8_e4m3", V4_RECORD, UNQUANTISED),
    packed_kv_cache_dtype="nvfp4_ds_mla",
    index_cache_dtypes=("mxfp4", "fp8", UNQUANTISED),
    slow_on_gpu=True,
)

BUILTIN = (FLASHMLA_MEGA, FLASHMLA, FLASHINFER_SM120, FLASHINFER_SM100, AITER, PORTABLE, REFERENCE)
