"""Index queries and head weights against the reference's."""

from __future__ import annotations

import pytest
import torch

from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.index_inputs import index_queries
from dsv41.backends.reference.norm import rotate
from dsv41.backends.reference.quantize import round_trip
from dsv41.config import DeepseekV41Config
from dsv41.hal.records import INDEX_MXFP4_68, RECORDS
from dsv41.rope import cos_sin_table

from .common import DEVICE, covering, layout_of, noise

BF16, FP32 = torch.bfloat16, torch.float32
TABLE = cos_sin_table(DeepseekV41Config(), 1, 4096, DEVICE)
POSITIONS = torch.tensor([4095, -1, 130], device=DEVICE)
SCALE = 128**-0.5 * 32**-0.5
FORMAT = RowFormat.of(layout_of(INDEX_MXFP4_68)).numbers()

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize(
    ("name", "heads", "tokens", "dtype"),
    covering([name for name in RECORDS if name.startswith("index_")], (1, 2, 20, 32), (0, 1, 3), (BF16, FP32)),
)
def test_queries_are_rotated_and_rounded_like_keys(name: str, heads: int, tokens: int, dtype: torch.dtype) -> None:
    """Bit for bit, from rows of wider tensors in which NaN stands that belongs to others."""
    record = RECORDS[name]
    sizes = torch.logspace(-5, 4, heads, device=DEVICE)[:, None]
    query = torch.full((tokens, heads + 1, 128), torch.nan, dtype=dtype, device=DEVICE)[:, :heads]
    query.copy_(noise(tokens, heads, 128) * sizes)
    weights = torch.full((tokens, heads + 3), torch.nan, dtype=dtype, device=DEVICE)[:, :heads]
    weights.copy_(noise(tokens, heads, seed=1))
    positions = POSITIONS[:tokens]
    found, found_weights = index_queries(
        query, weights, positions, TABLE, SCALE, RowFormat.of(layout_of(record)).numbers()
    )
    assert torch.equal(found, round_trip(record, rotate(query, positions, TABLE)))
    assert torch.equal(found_weights, weights * SCALE)


def test_nan_makes_its_group_nan_and_no_other() -> None:
    query = noise(1, 2, 128)
    query[0, 1, 40] = torch.nan
    query[0, 0, 70] = torch.nan
    found, _ = index_queries(query, noise(1, 2), POSITIONS[:1], TABLE, SCALE, FORMAT)
    expected = round_trip(INDEX_MXFP4_68, rotate(query, POSITIONS[:1], TABLE))
    assert found.isnan().sum() == 64
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_op_keeps_the_rules_of_custom_ops() -> None:
    query, weights = noise(2, 3, 128).to(BF16), noise(2, 3).to(BF16)
    torch.library.opcheck(index_queries, (query, weights, POSITIONS[:2], TABLE, SCALE, FORMAT))
