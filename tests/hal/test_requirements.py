"""Each requirement by itself: when it holds, and what it says when it does not."""

from typing import Any

import pytest

from dsv41.errors import BackendError, ConfigError, Dsv41Error, LayoutError
from dsv41.hal import requirements as need
from dsv41.hal.device import LIBRARIES, Device, Library, Platform, TorchBuild
from dsv41.hal.request import KV_CACHE_DTYPES, PHASES, Reason, Request
from dsv41.hal.types import Geometry

CUDA13 = TorchBuild("2.14.0+cu130", cuda="13.0")


def platform(torch: TorchBuild = CUDA13, environment: dict[str, str] | None = None, **libraries: Library) -> Platform:
    everything = {**{name: Library() for name in LIBRARIES}, **libraries}
    return Platform((Device.cpu(),), torch, libraries=everything, environment=environment or {})


def request(geometry: Geometry | None = None, **fields: Any) -> Request:
    return Request(geometry or Geometry(), **fields)


def ask(
    requirement: need.Requirement, arch: str = "sm_90", on: Platform | None = None, of: Request | None = None
) -> Reason | None:
    device = Device.cpu() if arch == "cpu" else Device.gpu(arch)
    return requirement(device, on or platform(), of or request())


def refused(reason: Reason | None, cls: str, *words: str) -> None:
    assert reason is not None
    assert reason.cls == cls
    for word in words:
        assert word in reason.text


def test_vendor() -> None:
    assert ask(need.vendor("nvidia", "amd"), "gfx942") is None
    refused(ask(need.vendor("nvidia", "amd"), "cpu"), "arch", "needs an NVIDIA GPU or an AMD GPU", "use another device")


def test_arch_by_target() -> None:
    assert ask(need.arch("sm_90a", "sm_100f"), "sm_103") is None
    refused(ask(need.arch("sm_90a", "sm_100f"), "sm_120"), "arch", "sm_90a, sm_100f", "cuda:0 is sm_120", "use another")


def test_fr_06_arch_by_what_the_installed_build_holds() -> None:
    requirement = need.arch("sm_90a", "sm_103a", library="flash_mla", upgrade="`pip install -U it`")
    old = platform(flash_mla=Library(True, "0429", frozenset({"sm_90a"})))
    assert ask(requirement, "sm_90", old) is None
    refused(ask(requirement, "sm_103", old), "library", "flash_mla 0429 was built for sm_90a", "`pip install -U it`")
    assert ask(requirement, "sm_103", platform()) is None  # nothing installed: that is another requirement's answer


def test_torch_reaches() -> None:
    assert ask(need.torch_reaches()) is None
    assert ask(need.torch_reaches(), "cpu", platform(TorchBuild("2.14.0+cpu"))) is None
    refused(
        ask(need.torch_reaches(), "sm_90", platform(TorchBuild("2+cpu"))), "platform", "CPU build", "pip install torch"
    )
    refused(ask(need.torch_reaches(), "gfx942"), "platform", "is a CUDA build and cannot use this ROCm device", "rocm")
    refused(ask(need.torch_reaches(), "cpu", platform(TorchBuild(None))), "platform", "pip install torch")


LIBRARY = need.library("triton", min_version="3.6", features={"x": "builds of May"}, install="`pip install -U triton`")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Library(), ("triton is not installed", "`pip install -U triton`")),
        (Library(True, "3.9", frozenset("x"), "it is broken"), ("triton cannot be used: it is broken", "Mend it with")),
        (Library(False, None, frozenset(), "it is foreign"), ("triton cannot be used: it is foreign",)),
        (Library(True, "3.5.1", frozenset("x")), ("triton 3.5.1 is too old, 3.6 or newer is needed",)),
        (Library(True, "3.9.0"), ("triton 3.9.0", "x (in builds of May)", "Get it with `pip install -U triton`")),
    ],
)
def test_fr_100_a_library_says_found_needed_and_where(found: Library, words: tuple[str, ...]) -> None:
    refused(ask(LIBRARY, on=platform(triton=found)), "library", *words)


def test_a_fit_library_passes() -> None:
    assert ask(LIBRARY, on=platform(triton=Library(True, "3.6.0", frozenset("x")))) is None


def test_torch_build() -> None:
    assert ask(need.torch_build("CUDA", 13)) is None
    twelve = platform(TorchBuild("2.14.0+cu126", cuda="12.6"))
    refused(
        ask(need.torch_build("CUDA", 13), on=twelve), "library", "need a torch built for CUDA 13", "CUDA 12.6", "cu130"
    )
    assert ask(need.torch_build("CUDA", 13), on=platform(TorchBuild("2+cpu"))) is None  # torch_reaches says it


def test_switch() -> None:
    requirement = need.switch("TRITON_INTERPRET", "1", because="runs every kernel in Python")
    assert ask(requirement) is None
    assert ask(requirement, on=platform(environment={"TRITON_INTERPRET": "0"})) is None
    refused(ask(requirement, on=platform(environment={"TRITON_INTERPRET": "1"})), "switch", "unset TRITON_INTERPRET")


def test_phase() -> None:
    assert ask(need.phase("decode", "prefill")) is None
    draft = request(phases=("decode", "draft"))
    refused(
        ask(need.phase("decode", "prefill"), of=draft), "phase", "no kernel for draft", "phases=('decode', 'prefill')"
    )


FLASHMLA_HEADS = (64, 128)
FLASHINFER_HEADS = (8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("num_heads", "flashmla", "flashinfer"),
    [
        (8, 64, 8),
        (16, 64, 16),
        (24, 64, 32),
        (32, 64, 32),
        (48, 64, 64),
        (64, 64, 64),
        (96, 128, 128),
        (128, 128, 128),
        (129, None, None),
    ],
)
def test_fr_69_heads_are_padded_to_the_smallest_accepted_count(
    num_heads: int, flashmla: int | None, flashinfer: int | None
) -> None:
    assert need.padded_heads(FLASHMLA_HEADS, num_heads) == flashmla
    assert need.padded_heads(FLASHINFER_HEADS, num_heads) == flashinfer


def test_heads() -> None:
    requirement = need.heads(*FLASHMLA_HEADS)
    assert ask(requirement) is None
    assert requirement.remark is not None
    assert requirement.remark(Device.gpu("sm_90"), platform(), request()) is None
    padded = requirement.remark(Device.gpu("sm_90"), platform(), request(tp_size=8))
    assert padded == "pads 8 heads to 64: attention costs as much as for 64"
    many = request(Geometry(num_heads=256, o_groups=32))
    refused(ask(requirement, of=many), "shape", "take 64, 128 query heads, a rank has 256", "use a larger tp_size")


def test_max_heads() -> None:
    requirement = need.max_heads(128)
    assert ask(requirement, of=request(Geometry(num_heads=128, o_groups=16))) is None
    wide = Geometry(num_heads=256, o_groups=32)
    assert ask(requirement, of=request(wide, tp_size=2)) is None
    refused(ask(requirement, of=request(wide)), "shape", "up to 128 query heads, a rank has 256", "larger tp_size")


def test_nvidia_from() -> None:
    requirement = need.nvidia_from("sm_80", because="as Triton does")
    for arch in ("sm_80", "sm_89", "sm_90", "sm_121", "gfx90a", "gfx1201", "cpu"):
        assert ask(requirement, arch) is None
    for arch in ("sm_70", "sm_75"):
        refused(ask(requirement, arch), "arch", "needs sm_80 or newer, as Triton does", f"cuda:0 is {arch}", "use")


def test_heads_per_group() -> None:
    assert ask(need.heads_per_group(8)) is None
    wide = request(Geometry(num_heads=128, o_groups=8))
    refused(ask(need.heads_per_group(8), of=wide), "shape", "128 heads in 8 groups make 16", "use another backend")


def test_geometry() -> None:
    assert ask(need.released_head_dims()) is None
    refused(
        ask(need.released_head_dims(), of=request(Geometry(head_dim=256))), "shape", "the model has 256", "use another"
    )
    assert ask(need.window(128)) is None
    refused(ask(need.window(128), of=request(Geometry(window=256))), "shape", "window of 128", "use another backend")


@pytest.mark.parametrize("topk", [64, 128, 192, 256, 512, 640, 1024])
def test_fr_08_narrower_index_rows_are_padded_up(topk: int) -> None:
    assert ask(need.index_width(128, 192, 256, 512, 1024), of=request(Geometry(topk=topk))) is None


def test_fr_08_wider_index_rows_are_refused_with_the_widths() -> None:
    wide = request(Geometry(topk=1152))
    refused(
        ask(need.index_width(128, 1024), of=wide),
        "shape",
        "no kernel for top-k 1152",
        "index widths 128, 1024",
        "at most",
    )


def test_fr_64_a_cache_beyond_what_the_kernel_addresses_is_refused_with_the_number() -> None:
    requirement = need.max_cache_bytes(2**32, because="its offsets are 32 bits wide")
    row = 576
    assert ask(requirement) is None
    assert ask(requirement, of=request(cache_bytes=7_000_000 * row)) is None
    refused(
        ask(requirement, of=request(cache_bytes=9_000_000 * row)),
        "shape",
        "4294967296",
        "5184000000",
        "use fewer pages",
    )


def test_fr_61_a_cache_is_judged_by_its_format_and_no_vendors_name() -> None:
    requirement = need.kv_cache_dtype("fp8", "fp8_e4m3")
    assert ask(requirement, of=request(kv_cache_dtype="fp8")) is None
    plain = request(kv_cache_dtype="bfloat16")
    refused(ask(requirement, "gfx942", of=plain), "dtype", "'bfloat16' on gfx942", "kv_cache_dtype='fp8_e4m3'")
    keys = request(index_cache_dtype="float32")
    refused(ask(need.index_cache_dtype("mxfp4", "fp8"), of=keys), "dtype", "'float32'", "index_cache_dtype='mxfp4'")


def test_requirements_that_hold_only_sometimes() -> None:
    here = need.on_arch(("gfx942",), need.window(7))
    assert ask(here, "gfx950") is None
    refused(ask(here, "gfx942"), "shape", "window of 7")
    packed = need.for_kv(("nvfp4_ds_mla",), need.window(7))
    assert ask(packed) is None
    refused(ask(packed, of=request(kv_cache_dtype="nvfp4_ds_mla")), "shape", "window of 7")


def test_every_requirement_can_be_put_into_a_table() -> None:
    for requirement in (need.vendor("amd"), need.arch("gfx942"), LIBRARY, need.heads(64), need.index_width(128)):
        assert requirement.summary
    assert LIBRARY.summary == "triton >= 3.6 with x (builds of May)"


# The request itself


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_heads_of_a_rank(tp_size: int) -> None:
    assert request(tp_size=tp_size).num_heads == 64 // tp_size


@pytest.mark.parametrize("tp_size", [0, -1, 3, 16, 64])
def test_fr_77_a_tp_size_that_divides_no_groups_is_refused_with_those_that_do(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size {tp_size} must divide .* use one of 1, 2, 4, 8$"):
        request(tp_size=tp_size)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"kv_cache_dtype": "fp8_ds_mlaa"}, LayoutError, "did you mean 'fp8_ds_mla'"),
        ({"kv_cache_dtype": "int4"}, LayoutError, ", ".join(KV_CACHE_DTYPES)),
        ({"index_cache_dtype": "mxfp8"}, LayoutError, "use one of auto, mxfp4, fp8"),
        ({"phases": ("decoding",)}, BackendError, "did you mean 'decode'"),
        ({"phases": ("train",)}, BackendError, ", ".join(PHASES)),
        ({"phases": ()}, BackendError, "phases is empty"),
    ],
)
def test_an_unknown_name_is_refused_with_the_valid_ones(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        request(**fields)


def test_a_reason_has_a_known_class() -> None:
    with pytest.raises(Dsv41Error, match="reason class 'other' is none of arch, platform"):
        Reason("other", "text")
