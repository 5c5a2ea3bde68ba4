"""Offsets are 64 bits wide: whatever counts tokens, slots or pages is widened before it is multiplied by a distance.

A lint over the source of every kernel. A product of 32 bits that overflows is wrong only on caches of more than 2**31
bytes, which no small test has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[3] / "backends"
FILES = sorted(path for room in ("portable", "cuda") for path in (BACKENDS / room).glob("*.py"))

DISTANCE = re.compile(r"stride|^num_|^width$|_width$|^capacity$|_capacity$")
"""Arguments that are a distance or a size known only at run time."""
PAGE_STRIDES = ("cache[3]", "cache[4]")
"""The same in the tuple that `rows.py` calls a cache."""
WIDE = ("slot", "slots", "token", "position")
"""Parameters of device functions that are int64; every call is checked to pass one."""
INT64_TENSORS = re.compile(r"slots|positions|topk|candidates|token_request|num_visible|lengths")
"""Pointers to int64: what is loaded from them is wide."""
FEW = ("head", "group", "tl.program_id(1)")
"""Factors that stay below 2**10, so that no product with a distance within a token overflows."""


def kernels(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def is_distance(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return bool(DISTANCE.search(node.id)) and not node.id.isupper()
    return ast.unparse(node) in PAGE_STRIDES


def is_wide(node: ast.AST, names: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "int64":
            return True
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "tl.load":
            return bool(INT64_TENSORS.search(ast.unparse(part.args[0])))
    return False


def expected_wide(function: ast.FunctionDef) -> set[str]:
    """The parameters that a function takes for int64; not those that it widens itself."""
    source = ast.unparse(function)
    names = {argument.arg for argument in function.args.args if argument.arg in WIDE}
    return {name for name in names if f"{name}.to(tl.int64)" not in source}


def wide_names(function: ast.FunctionDef) -> set[str]:
    names = expected_wide(function)
    while True:
        before = len(names)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_wide(node.value, names):
                names |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if len(names) == before:
            return names


def is_small(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Constant) or any(re.fullmatch(rf"{re.escape(few)}(\[.*\])?", text) for few in FEW)


def narrow_products(source: str) -> list[str]:
    """Products of something narrow with a distance, and calls that pass something narrow for what must be wide."""
    found = []
    functions = list(kernels(ast.parse(source)))
    known = {function.name: function for function in functions}
    for function in functions:
        names = wide_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for one, other in ((node.left, node.right), (node.right, node.left)):
                    if is_distance(one) and not (is_wide(other, names) or is_small(other) or is_wide(one, names)):
                        found.append(f"{function.name}, line {node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                called = known[node.func.id]
                for parameter, value in zip(called.args.args, node.args, strict=False):
                    if parameter.arg in expected_wide(called) and not is_wide(value, names):
                        found.append(f"{function.name}, line {node.lineno}: {parameter.arg}={ast.unparse(value)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_offset_is_multiplied_in_32_bits(path: Path) -> None:
    assert narrow_products(path.read_text()) == []


def test_there_are_kernels_to_look_at() -> None:
    assert sum(len(list(kernels(ast.parse(path.read_text())))) for path in FILES) > 20


@pytest.mark.parametrize(
    "body",
    [
        "token = tl.program_id(0)\n    tl.store(x + token * x_stride, 0)",
        "tl.store(x + tl.program_id(0) * num_window, 0)",
        "page = tl.load(pages)\n    tl.store(x + page * page_stride, 0)",
        "cache = (x, x_stride)\n    tl.store(x + page // 64 * cache[3], 0)",
        "_device(tl.program_id(0))",
    ],
)
def test_the_lint_finds_what_is_narrow(body: str) -> None:
    device = "@triton.jit\ndef _device(token):\n    pass\n"
    assert narrow_products(
        f"{device}@triton.jit\ndef _kernel(x, x_stride, page_stride, num_window, pages):\n    {body}\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        "token = tl.program_id(0).to(tl.int64)\n    tl.store(x + token * x_stride, 0)",
        "slot = tl.load(slots + 3)\n    tl.store(x + slot * page_stride, 0)",
        "tl.store(x + head[:, None] * x_stride, 0)",
        "row = tl.program_id(0).to(tl.int64) + 1\n    other = row // 2\n    tl.store(x + other * x_stride, 0)",
    ],
)
def test_the_lint_passes_what_is_wide(body: str) -> None:
    assert narrow_products(f"@triton.jit\ndef _kernel(x, x_stride, page_stride, slots, head):\n    {body}\n") == []
