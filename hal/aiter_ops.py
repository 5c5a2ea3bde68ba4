"""Which way each op of the aiter backend goes on a machine: that of the library, or that of the portable kernels.

What the backend cannot do without is among its requirements; what is said here speaks against nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from dsv41.hal.device import Device, Library, Platform
from dsv41.hal.request import Request
from dsv41.hal.requirements import Requirement

ENV_AITER_PRODUCTS = "DSV41_AITER_PRODUCTS"
AUTO, PORTABLE, BLOCK128 = "auto", "portable", "block128"
AITER_PRODUCTS = (AUTO, PORTABLE, BLOCK128)
"""Which products the library does: those that it computes as the portable kernels do, none, or also others, with one
scale for 128 x 128 of a weight and one for 128 of an activation, which rounds both."""
_NEWER = "the sources of autumn 2026"


def aiter_ops() -> tuple[Requirement, ...]:
    return (
        _op("attention", lambda device, found, asked: _attention(device, found)),
        _op("wq_a with wkv, wo_b", lambda device, found, asked: _product(device, found, asked, "gemm_mxfp8")),
        _op("wo_a", lambda device, found, asked: _product(device, found, asked, "bmm_mxfp8")),
        _op("norms and their MXFP8", lambda *_: "the portable kernel, since aiter's scales are not MXFP8's"),
    )


_ROWS = {"gfx942": "over plain rows in FNUZ", "gfx950": "over 584-byte records or plain rows"}


def _op(name: str, path: Callable[[Device, Library, str], str]) -> Requirement:
    """Says which way the op goes, by the device, the library and what DSV41_AITER_PRODUCTS asks for."""

    def remark(device: Device, platform: Platform, request: Request) -> str | None:
        found = platform.library("aiter")
        if device.arch not in _ROWS or not found.installed or found.problem:
            return None
        return f"{name}: {path(device, found, platform.environment.get(ENV_AITER_PRODUCTS, AUTO).strip().lower())}"

    return Requirement(f"{name}: any way will do", lambda device, platform, request: None, remark)


def _attention(device: Device, found: Library) -> str:
    if "sparse_mla" in found.features:
        return f"aiter's sparse MLA, {_ROWS[device.arch]}"
    return f"aiter {found.version} has no sparse_mla, which {_NEWER} have"


def _product(device: Device, found: Library, asked: str, feature: str) -> str:
    if asked == PORTABLE:
        return f"the portable kernels, as {ENV_AITER_PRODUCTS}={asked} asks for"
    if device.arch == "gfx950" and feature in found.features:
        return "aiter, where activations are rounded to MXFP8 (quantize_activations); else the portable kernels"
    if asked == BLOCK128 and feature == "gemm_mxfp8" and "gemm_blockscale" in found.features:
        return f"aiter by blocks of 128, which rounds weights and activations, as {ENV_AITER_PRODUCTS}={asked} asks for"
    if device.arch != "gfx950":
        return f"the portable kernels: aiter's product of MXFP8 is for gfx950, {device.key} is {device.arch}"
    return f"the portable kernels: aiter {found.version} has no {feature}, which {_NEWER} have"
