"""Versions as kernel libraries write them."""

import pytest

from dsv41.hal.versions import at_least, build_date, meets, public, release


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.7.4", (0, 7, 4)), ("0.7.2.post1", (0, 7, 2)), ("v1.2rc1+cu130", (1, 2)), ("3", (3,)), ("unknown", ())],
)
def test_release(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize(
    ("version", "needed", "expected"),
    [
        ("3.6.0", "3.6", True),
        ("3.5.1", "3.6", False),
        ("3.10.0", "3.6", True),
        ("0.6.13", "0.6.14", False),
        ("0.6.14+cu130", "0.6.14", True),
        ("3", "3.0.0", True),
        (None, "0", False),
    ],
)
def test_at_least(version: str | None, needed: str, expected: bool) -> None:
    assert at_least(version, needed) is expected


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.14.0+cu130", "==2.14.0", True),
        ("2.14.0", "==2.14", True),
        ("2.13.1", "==2.14.0", False),
        ("2.14.3", "==2.14.*", True),
        ("2.15.0", "==2.14.*", False),
        ("2.11.0", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.10.0", ">=2.11", False),
        ("2.14.0", "!=2.13.0", True),
    ],
)
def test_meets(version: str, specifier: str, expected: bool) -> None:
    assert meets(version, specifier) is expected


def test_local_parts_and_dates() -> None:
    assert public("0.7.4+cu130") == "0.7.4"
    assert build_date("1.0.0.post20260924") == 20260924
    assert build_date("1.0.0.post20260924+local") == 20260924
    assert build_date("1.0.0.post1") is None
    assert build_date(None) is None
