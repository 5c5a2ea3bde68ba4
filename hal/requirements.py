"""What a backend may require: one small predicate for each thing, made by a function named after it.

A requirement looks at one device, its platform and the request, and answers None or a `Reason` that says what is
wrong and what to do. All requirements of a backend are asked, so that an explanation is complete. Any callable of
that signature will do; those made here also carry a summary, from which tables of capabilities are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsv41.hal.arch import ARCHS, runs_on
from dsv41.hal.device import TORCH_INSTALL, TORCH_VENDORS, Device, Platform
from dsv41.hal.request import UNSPECIFIC_KV_CACHE_DTYPES, Reason, Request
from dsv41.hal.versions import at_least, release

Check = Callable[[Device, Platform, Request], Reason | None]


@dataclass(frozen=True)
class Requirement:
    """A check with a summary of what it asks for. `remark` may add what a passing check costs."""

    summary: str
    check: Check
    remark: Callable[[Device, Platform, Request], str | None] | None = None

    def __call__(self, device: Device, platform: Platform, request: Request) -> Reason | None:
        return self.check(device, platform, request)


# The device


def vendor(*vendors: str) -> Requirement:
    """The device is of one of these vendors."""
    known = {"nvidia": "an NVIDIA GPU", "amd": "an AMD GPU", "cpu": "a CPU"}
    wanted = " or ".join(known.get(name, f"a device of {name}") for name in vendors)

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if device.vendor in vendors:
            return None
        return Reason("arch", f"needs {wanted}; {_describe(device)}: use another device or another backend")

    return Requirement(wanted, check)


def arch(*targets: str, library: str | None = None, upgrade: str = "") -> Requirement:
    """The device runs code built for one of `targets`: `sm_90a`, `sm_100f`, `gfx950`.

    Where `library` is installed and its features name the targets that it was built for, those count; a device that
    only a newer build serves gets `upgrade` as advice.
    """

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if not any(runs_on(target, device.arch) for target in targets):
            return Reason(
                "arch",
                f"its kernels are built for {_list(targets)}; {_describe(device)}: nothing to install changes that, "
                "use another backend or another device",
            )
        found = platform.library(library) if library else None
        built = sorted(feature for feature in found.features if feature.startswith("sm_")) if found else []
        if found and built and not any(runs_on(target, device.arch) for target in built):
            return Reason(
                "library",
                f"{library} {found.version} was built for {_list(built)}, which does not run on {device.arch}: upgrade "
                f"it with {upgrade}",
            )
        return None

    return Requirement(f"built for {_list(targets)}", check)


def nvidia_from(oldest: str, *, because: str) -> Requirement:
    """An NVIDIA device is `oldest` (such as `sm_80`) or newer; devices of other vendors pass."""
    portable_code = oldest.replace("sm_", "compute_")

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if device.vendor != "nvidia" or runs_on(portable_code, device.arch):
            return None
        return Reason("arch", f"needs {oldest} or newer, {because}; {_describe(device)}: use another device or backend")

    return Requirement(f"{oldest} or newer where it is NVIDIA's", check)


def torch_reaches() -> Requirement:
    """torch can compute on the device."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        problem = platform.reach_problem(device)
        return Reason("platform", problem) if problem else None

    return Requirement("a torch that can use the device", check)


# Software


def library(
    name: str, *, install: str, min_version: str | None = None, features: Mapping[str, str] | None = None
) -> Requirement:
    """A kernel library, by import name, is there, can be used and can do what is needed.

    `install` is the command that mends it. `features` says for each feature where it comes from ("0.7.1",
    "a build of 2026-09-10 or later"); features are asked for rather than versions wherever the library shows them.
    """
    needed = dict(features or {})

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        found = platform.library(name)
        if found.problem:
            return Reason("library", f"{name} cannot be used: {found.problem}. Mend it with {install}")
        if not found.installed:
            return Reason("library", f"{name} is not installed: {install}")
        if min_version and not at_least(found.version, min_version):
            return Reason("library", f"{name} {found.version} is too old, {min_version} or newer is needed: {install}")
        missing = {feature: source for feature, source in needed.items() if feature not in found.features}
        if missing:
            wanted = "; ".join(f"{feature} (in {source})" for feature, source in missing.items())
            return Reason(
                "library", f"{name} {found.version} does not have what is needed: {wanted}. Get it with {install}"
            )
        return None

    extra = [f">= {min_version}"] if min_version else []
    return Requirement(
        " ".join([name, *extra, *(f"with {feature} ({source})" for feature, source in needed.items())]), check
    )


def torch_build(kind: str, major: int) -> Requirement:
    """torch was built for that major version of CUDA or ROCm, as the binaries of a library need."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        torch = platform.torch
        built_for = torch.cuda if kind == "CUDA" else torch.hip
        if built_for is None or not device.is_gpu:
            return None  # torch_reaches says it
        if release(built_for)[:1] == (major,):
            return None
        return Reason(
            "library",
            f"its binaries need a torch built for {kind} {major}; torch {torch.version} is built for {kind} "
            f"{built_for}: `{TORCH_INSTALL[kind]}`",
        )

    return Requirement(f"a torch built for {kind} {major}", check)


def switch(variable: str, *refused: str, because: str) -> Requirement:
    """An environment variable does not have one of these values."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        value = platform.environment.get(variable)
        if value is None or value.strip() not in refused:
            return None
        return Reason("switch", f"{variable}={value} {because}: unset {variable}")

    return Requirement(f"{variable} not set to {_list(refused)}", check)


# The request


def phase(*accepted: str) -> Requirement:
    """Every phase asked for is one of these."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        missing = [name for name in request.phases if name not in accepted]
        if not missing:
            return None
        return Reason(
            "phase",
            f"has no kernel for {_list(missing)}: ask for phases={tuple(accepted)} only, or use a backend that serves "
            "all of them",
        )

    return Requirement(f"phases {_list(accepted)}", check)


def padded_heads(accepted: Sequence[int], num_heads: int) -> int | None:
    """The smallest accepted head count that holds `num_heads`; None where there is none."""
    return min((count for count in accepted if count >= num_heads), default=None)


def heads(*accepted: int, only: Callable[[Platform], Sequence[int]] | None = None) -> Requirement:
    """The heads of a rank can be padded to one of these counts. `only` narrows them by what is installed."""

    def counts(platform: Platform) -> Sequence[int]:
        return only(platform) if only else accepted

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if padded_heads(counts(platform), request.num_heads) is not None:
            return None
        return Reason(
            "shape",
            f"its kernels take {_list(counts(platform))} query heads, a rank has {request.num_heads}: use a larger "
            "tp_size or another backend",
        )

    def remark(device: Device, platform: Platform, request: Request) -> str | None:
        padded = padded_heads(counts(platform), request.num_heads)
        if padded is None or padded == request.num_heads:
            return None
        return f"pads {request.num_heads} heads to {padded}: attention costs as much as for {padded}"

    return Requirement(f"{_list(accepted)} heads a rank, fewer are padded", check, remark)


def max_heads(limit: int) -> Requirement:
    """A rank has at most this many heads; none are padded."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if request.num_heads <= limit:
            return None
        return Reason(
            "shape",
            f"its kernels take up to {limit} query heads, a rank has {request.num_heads}: use a larger tp_size or "
            "another backend",
        )

    return Requirement(f"up to {limit} heads a rank", check)


def heads_per_group(wanted: int) -> Requirement:
    """The output projection has that many heads in each group."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        found = request.geometry.num_heads // request.geometry.o_groups
        if found == wanted and request.geometry.num_heads % request.geometry.o_groups == 0:
            return None
        return Reason(
            "shape",
            f"its output has {wanted} heads a group fused in; {request.geometry.num_heads} heads in "
            f"{request.geometry.o_groups} groups make {found}: use another backend for this model",
        )

    return Requirement(f"{wanted} heads an output group", check)


def released_head_dims() -> Requirement:
    """The head and its rotated part are as wide as in the released model, which kernels have built in."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        from dsv41.hal.types import Geometry

        released, asked = Geometry(), request.geometry
        if (asked.head_dim, asked.rope_head_dim) == (released.head_dim, released.rope_head_dim):
            return None
        return Reason(
            "shape",
            f"its kernels are built for head_dim {released.head_dim} with {released.rope_head_dim} rotated; the model "
            f"has {asked.head_dim} with {asked.rope_head_dim}: use another backend for this model",
        )

    return Requirement("the release's head_dim", check)


def window(size: int) -> Requirement:
    """The sliding window is exactly this long."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if request.geometry.window == size:
            return None
        return Reason(
            "shape",
            f"its kernels have a window of {size} rows built in, the model has {request.geometry.window}: use another "
            "backend for this model",
        )

    return Requirement(f"a window of {size}", check)


def index_width(*instances: int) -> Requirement:
    """The top-k can be padded up to one of the widths that the kernel was instantiated for."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if request.geometry.topk <= max(instances):
            return None
        return Reason(
            "shape",
            f"has no kernel for top-k {request.geometry.topk}, only for index widths {_list(instances)}: use a top-k "
            f"of at most {max(instances)} or another backend",
        )

    return Requirement(f"index widths {_list(instances)}, narrower ones are padded", check)


def max_cache_bytes(limit: int, because: str) -> Requirement:
    """No cache is larger than the kernel can address. Passes while the size is unknown."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if request.cache_bytes is None or request.cache_bytes <= limit:
            return None
        return Reason(
            "shape",
            f"{because}, so a cache may have {limit} bytes, {request.cache_bytes} are asked for: use fewer pages or "
            "another backend",
        )

    return Requirement(f"caches of at most {limit} bytes", check)


def kv_cache_dtype(*accepted: str) -> Requirement:
    """The KV caches are asked for in one of these formats. Add "auto" and "fp8" where it can resolve them."""
    return _dtype("kv_cache_dtype", accepted, lambda request: request.kv_cache_dtype)


def index_cache_dtype(*accepted: str) -> Requirement:
    """The index-key caches are asked for in one of these formats."""
    return _dtype("index_cache_dtype", accepted, lambda request: request.index_cache_dtype)


def _dtype(field: str, accepted: tuple[str, ...], of: Callable[[Request], str]) -> Requirement:
    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if of(request) in accepted:
            return None
        first = next((name for name in accepted if name not in UNSPECIFIC_KV_CACHE_DTYPES), accepted[0])
        where = f" on {device.arch}" if device.is_gpu else ""
        return Reason(
            "dtype", f"does not read {of(request)!r}{where}, only {_list(accepted)}: ask for {field}={first!r}"
        )

    return Requirement(f"{field} {_list(accepted)}", check)


# Requirements that hold only sometimes


def on_arch(archs: Sequence[str], requirement: Requirement) -> Requirement:
    """`requirement`, on devices of these archs only."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        return requirement(device, platform, request) if device.arch in archs else None

    return Requirement(f"on {_list(archs)}: {requirement.summary}", check, requirement.remark)


def for_kv(dtypes: Sequence[str], requirement: Requirement) -> Requirement:
    """`requirement`, where one of these KV cache formats is asked for only."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        return requirement(device, platform, request) if request.kv_cache_dtype in dtypes else None

    return Requirement(f"for {_list(dtypes)}: {requirement.summary}", check, requirement.remark)


def _list(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items)


def _describe(device: Device) -> str:
    if not device.is_gpu:
        return "this device is the CPU"
    unlisted = device.vendor in TORCH_VENDORS and device.arch not in ARCHS
    remark = ", which is in no table of this package" if unlisted else ""
    return f"{device.key} is {device.arch} ({device.name}){remark}"
