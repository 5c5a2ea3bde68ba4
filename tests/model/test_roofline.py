"""Floors in closed form."""

from __future__ import annotations

import pytest

from dsv41.roofline import RATES, DeviceRates, Work, attention_work, floor, matmul_work, rates_of

ROUND = DeviceRates("round", bytes_per_second=1e12, flops_per_second=1e15)
V4 = ((128, 584), (512, 584))


def test_attention_reads_each_selected_row_once_a_token() -> None:
    work = attention_work(1, 64, V4)
    assert work.bytes == 640 * (584 + 4) + 2 * 64 * 512 * 2
    assert work.flops == 4 * 640 * 64 * 512 == 83_886_080


@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_bytes_of_rows_do_not_grow_with_heads(tokens: int) -> None:
    """The latent is shared by all heads: more of them add their queries and outputs, and no rows."""
    few, many = (attention_work(tokens, heads, V4) for heads in (8, 128))
    assert many.bytes - few.bytes == tokens * (128 - 8) * 2 * 512 * 2
    assert many.flops == 16 * few.flops


def test_records_of_two_sizes_add_up() -> None:
    work = attention_work(3, 1, ((128, 528), (512, 288)), head_dim=16, activation_bytes=4)
    assert work.bytes == 3 * (128 * 532 + 512 * 292 + 2 * 16 * 4)
    assert work.flops == 3 * 4 * 640 * 16


def test_a_matrix_product_reads_its_weights_once() -> None:
    work = matmul_work(10, out_features=30, in_features=20, weight_bytes=1.0)
    assert work == Work(bytes=30 * 20 + 10 * (20 + 30) * 2, flops=2 * 10 * 30 * 20)
    assert matmul_work(20, 30, 20, 1.0).bytes - work.bytes == 10 * 50 * 2


def test_the_floor_is_the_longer_of_the_two() -> None:
    slow_memory = floor(Work(bytes=2e12, flops=1e15), ROUND)
    assert (slow_memory.seconds, slow_memory.bound) == (2.0, "memory")
    slow_math = floor(Work(bytes=1e12, flops=3e15), ROUND)
    assert (slow_math.memory, slow_math.compute, slow_math.seconds, slow_math.bound) == (1.0, 3.0, 3.0, "compute")


def test_what_was_measured_on_an_h200_lies_above_the_floor() -> None:
    """Microseconds of FlashMLA for 512 tokens, and of laboratory kernels with 16 and 8 heads."""
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    assert rates.measured
    for heads, measured, bound in ((64, 149.2, "memory"), (16, 81.0, "memory"), (8, 65.3, "memory")):
        least = floor(attention_work(512, heads, V4), rates)
        assert least.bound == bound
        assert 0.3 * measured < least.seconds * 1e6 < measured
    prefill = floor(attention_work(4096, 64, V4), rates)
    assert prefill.seconds * 1e6 < 618


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB300", "B300"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_devices_are_known_by_the_names_of_their_drivers(reported: str, name: str) -> None:
    rates = rates_of(reported)
    assert rates is not None
    assert rates.name == name


@pytest.mark.parametrize("reported", ["NVIDIA H20", "Tesla V100-SXM2-32GB", "AMD Radeon RX 9070", ""])
def test_another_device_is_not_taken_for_one_of_them(reported: str) -> None:
    assert rates_of(reported) is None


def test_rates_are_of_a_plausible_size() -> None:
    assert len({rates.name for rates in RATES}) == len(RATES)
    for rates in RATES:
        assert 1e11 < rates.bytes_per_second < 1e13
        assert 1e14 < rates.flops_per_second < 1e16
