"""Just enough of version numbers to compare those of kernel libraries."""

from __future__ import annotations

import re


def public(version: str) -> str:
    """The version without its local part: "0.7.4+cu130" is "0.7.4"."""
    return version.split("+")[0].strip()


def release(version: str) -> tuple[int, ...]:
    """The numbers of the release part: "0.7.2.post1" and "v0.7.2rc1+cu130" are (0, 7, 2)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", public(version))
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def at_least(version: str | None, needed: str) -> bool:
    """Whether a release is `needed` or newer; an unknown version is not."""
    if version is None:
        return False
    have, want = release(version), release(needed)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))


def meets(version: str, specifier: str) -> bool:
    """Whether a release is within "==2.14.0", ">=2.11,<2.15" or "2.14.*" after "=="; other operators are not judged."""
    for operator, bound in re.findall(r"(==|>=|<)\s*(\d[\w.*+]*)", specifier):
        series = release(bound)
        equal = release(version)[: len(series)] == series if bound.endswith(".*") else _same(version, bound)
        if not {"==": equal, ">=": at_least(version, bound), "<": not at_least(version, bound)}[operator]:
            return False
    return True


def _same(one: str, other: str) -> bool:
    return at_least(one, other) and at_least(other, one)


def build_date(version: str | None) -> int | None:
    """The date in a version that ends in `.postYYYYMMDD`, as a number; None where there is none."""
    match = re.search(r"\.post(20\d{6})$", public(version or ""))
    return int(match[1]) if match else None
