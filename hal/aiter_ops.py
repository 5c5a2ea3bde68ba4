"""Which products aiter does on a machine, and which the portable kernels do, as the report says of each op."""

from __future__ import annotations

from dsv41.hal.device import Device, Platform
from dsv41.hal.paths import Path
from dsv41.hal.request import Reason, Request
from dsv41.hal.requirements import Requirement, arch, library

ENV_AITER_PRODUCTS = "DSV41_AITER_PRODUCTS"
AUTO, PORTABLE, BLOCK128 = "auto", "portable", "block128"
AITER_PRODUCTS = (AUTO, PORTABLE, BLOCK128)
"""Which products the library does: those that it computes as the portable kernels do, none, or also others, with one
scale for 128 x 128 of a weight and one for 128 of an activation, which rounds both."""
_NEWER = "the sources of autumn 2026"
_MXFP8 = "aiter where activations are rounded to MXFP8 (quantize_activations), portable kernels elsewhere"


def product_paths(install: str) -> tuple[Path, ...]:
    """Of the products with fp8 weights; `install` is where a new enough aiter comes from."""
    down = "wq_a with wkv, wo_b"

    def of_library(feature: str) -> Requirement:
        return library("aiter", features={feature: _NEWER}, install=install)

    return (
        Path(
            down,
            "aiter where activations are rounded to MXFP8, and elsewhere by blocks of 128, which rounds weights and "
            "activations",
            (arch("gfx950"), _wanted(BLOCK128), of_library("gemm_mxfp8"), of_library("gemm_blockscale")),
        ),
        Path(down, _MXFP8, (arch("gfx950"), _asked(AUTO, BLOCK128), of_library("gemm_mxfp8"))),
        Path(
            down,
            "aiter by blocks of 128, which rounds weights and activations",
            (_asked(BLOCK128), of_library("gemm_blockscale")),
        ),
        Path(down, "portable kernels"),
        Path("wo_a", _MXFP8, (arch("gfx950"), _asked(AUTO, BLOCK128), of_library("bmm_mxfp8"))),
        Path("wo_a", "portable kernels"),
    )


def asked_for(named: str | None) -> str:
    """What a value of DSV41_AITER_PRODUCTS asks for; nothing is `auto`."""
    return (named or "").strip().lower() or AUTO


def _asked(*values: str) -> Requirement:
    """DSV41_AITER_PRODUCTS has one of these values."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        value = asked_for(platform.environment.get(ENV_AITER_PRODUCTS))
        if value in values:
            return None
        return Reason("switch", f"{ENV_AITER_PRODUCTS} is {value}: set it to {values[0]}")

    return Requirement(f"{ENV_AITER_PRODUCTS}={values[0]}", check)


def _wanted(value: str) -> Requirement:
    """DSV41_AITER_PRODUCTS is this value; where it is not, that is nothing to wish for."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        named = asked_for(platform.environment.get(ENV_AITER_PRODUCTS))
        return None if named == value else Reason("planned", f"{ENV_AITER_PRODUCTS} is {named}")

    return Requirement(f"{ENV_AITER_PRODUCTS}={value}", check)
