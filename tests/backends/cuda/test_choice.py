"""The kernel for a call: by the table, or by whoever asks for another."""

from __future__ import annotations

import pytest

from dsv41.backends.cuda.choice import KERNELS, choose
from dsv41.errors import BackendError

from ...wording import refused


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 128])
@pytest.mark.parametrize("tokens", [0, 1, 32, 512, 4096, 1 << 20])
def test_flashmla_is_faster_at_every_size_that_was_measured(
    heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, "", " ", "auto"):
        monkeypatch.delenv("DSV41_FLASHMLA_KERNEL", raising=False)
        if value is not None:
            monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", value)
        assert choose(heads, tokens) == "flashmla"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_environment_decides_where_it_says_something(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (kernel, f" {kernel.upper()}\n"):
        monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", value)
        assert choose(8, 1) == choose(64, 4096) == kernel


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "triton")
    with refused(BackendError, "DSV41_FLASHMLA_KERNEL is 'triton'", *KERNELS):
        choose(64, 1)
