"""Which code runs where, against NVIDIA's table of targets typed here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.hal.arch import ARCHS, runs_on, vendor_of

# "f" and "a" targets: CUDA's notes on family- and architecture-specific features. Plain: binary compatibility.
TARGETS = {
    "sm_80": {"sm_80", "sm_86", "sm_89"},
    "sm_89": {"sm_89"},
    "sm_90": {"sm_90"},
    "sm_90a": {"sm_90"},
    "sm_100": {"sm_100", "sm_103"},
    "sm_100a": {"sm_100"},
    "sm_100f": {"sm_100", "sm_103"},
    "sm_103a": {"sm_103"},
    "sm_103f": {"sm_103"},
    "sm_110a": {"sm_110"},
    "sm_110f": {"sm_110"},
    "sm_120": {"sm_120", "sm_121"},
    "sm_120a": {"sm_120"},
    "sm_120f": {"sm_120", "sm_121"},
    "sm_121a": {"sm_121"},
    "compute_90": {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"},
    "compute_90a": {"sm_90"},
    "gfx942": {"gfx942"},
    "gfx950": {"gfx950"},
}


@pytest.mark.parametrize("target", TARGETS)
def test_fr_05_a_target_runs_on_exactly_these(target: str) -> None:
    assert {arch for arch in ARCHS if runs_on(target, arch)} == TARGETS[target]


@given(st.integers(50, 130), st.integers(50, 130))
def test_fr_05_an_a_target_runs_on_one_arch_only(target: int, arch: int) -> None:
    assert runs_on(f"sm_{target}a", f"sm_{arch}") == (target == arch)


@given(st.integers(50, 130), st.integers(50, 130), st.sampled_from(["", "f"]))
def test_fr_05_no_target_crosses_a_major_number(target: int, arch: int, suffix: str) -> None:
    if runs_on(f"sm_{target}{suffix}", f"sm_{arch}"):
        assert target // 10 == arch // 10
        assert target <= arch


def test_vendors_do_not_meet() -> None:
    assert not runs_on("sm_90a", "gfx942")
    assert not runs_on("gfx942", "sm_90")
    assert not runs_on("sm_90a", "cpu")


@pytest.mark.parametrize("bad", ["90a", "sm90", "sm_90x", "gfx", "hopper", ""])
def test_a_target_of_no_known_form_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="build target"):
        runs_on(bad, "sm_90")


def test_every_listed_arch_has_a_vendor_and_sane_facts() -> None:
    for arch, facts in ARCHS.items():
        assert vendor_of(arch) == ("amd" if arch.startswith("gfx") else "nvidia")
        assert facts.warp_size in (32, 64)
        assert 64 * 1024 <= facts.shared_memory_bytes <= 320 * 1024
    assert {arch for arch, facts in ARCHS.items() if facts.fp8_dialect == "fnuz"} == {"gfx942"}
