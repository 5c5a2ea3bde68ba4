"""The kernel for a call: by the table, or by whoever asks for another."""

from __future__ import annotations

import pytest

from dsv41.backends.cuda import choice
from dsv41.backends.cuda.choice import KERNELS, Choice
from dsv41.errors import BackendError

from ...wording import refused

MISSING = "it was left at home"
TOKENS = [0, 1, 32, 512, 4096, 1 << 20]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV41_FLASHMLA_KERNEL", raising=False)


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 128])
@pytest.mark.parametrize("value", [None, "", " ", "auto"])
def test_the_table_names_what_was_measured_to_be_faster(
    heads: int, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", value)
    for tokens in TOKENS:
        assert Choice.read("sm_90", None).kernel(heads, tokens) == ("hopper" if heads <= 64 else "flashmla")
        assert Choice.read("sm_90", MISSING).kernel(heads, tokens) == "flashmla"
        assert Choice.read("sm_100", MISSING).kernel(heads, tokens) == "flashmla"
    assert Choice.read("sm_90", None).pads(heads) == (heads > 64)
    assert Choice.read("sm_100", MISSING).pads(heads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_environment_decides_where_it_says_something(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (kernel, f" {kernel.upper()}\n"):
        monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", value)
        assert {Choice.read("sm_90", None).kernel(8, tokens) for tokens in TOKENS} == {kernel}


def test_all_else_is_ours_too_unless_another_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, ours in (("", True), ("flashmla", False), ("portable", False), ("hopper", True)):
        monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", kernel)
        assert Choice.read("sm_90", None).ours == ours
        assert Choice.read("sm_90", None).max_tokens_for_overlap == (256 if kernel == "hopper" else 0)
    monkeypatch.delenv("DSV41_FLASHMLA_KERNEL")
    assert not Choice.read("sm_100", MISSING).ours
    assert Choice.read("sm_100", MISSING).max_tokens_for_overlap == 0


def test_more_heads_than_ours_are_flashmlas_whatever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "hopper")
    assert Choice.read("sm_90", None).kernel(65, 1) == "flashmla"


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "triton")
    with refused(BackendError, "DSV41_FLASHMLA_KERNEL is 'triton'", *KERNELS):
        Choice.read("sm_90", None)


def test_a_kernel_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "hopper")
    with refused(BackendError, "'hopper', which does not run here (it was left at home)"):
        Choice.read("sm_100", MISSING)


def test_heads_are_padded_where_any_number_of_tokens_is_flashmlas(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"sm_90": {16: {4: "hopper", 64: "flashmla", 1 << 62: "hopper"}, 128: {1 << 62: "portable"}}}
    monkeypatch.setattr(choice, "_TABLES", tables | {"sm_100": {}})
    assert Choice.read("sm_90", None).pads(8)
    assert not Choice.read("sm_90", None).pads(64)
