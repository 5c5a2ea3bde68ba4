"""The sources of kernel libraries as their wheels hold them, and the signatures in them; nothing is imported.

Wheels come from PyPI; of each the files of one kind are kept, in the folder that DSV41_WHEELS names or in the user's
cache.
"""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_SECONDS = 120


class NoWheel(Exception):
    """A wheel that could not be had."""


MODULES = (".py",)
EVERYTHING = ("",)


@cache
def sources(
    distribution: str, version: str, python: str | None = None, endings: tuple[str, ...] = MODULES, inside: str = ""
) -> Path:
    """The folder with the files of a wheel whose names end so and begin with `inside`.

    `python` ("3.12") is the interpreter of wheels for Linux on x86-64 that fit no other; None = any. Raises NoWheel
    where PyPI cannot be reached.
    """
    base = os.environ.get("DSV41_WHEELS") or Path.home() / ".cache" / "dsv41" / "wheels"
    folder = Path(base) / f"{distribution}-{version}{'' if endings == MODULES else '-data'}"
    if folder.is_dir():
        return folder
    options = []
    if python is not None:
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)]
        options = [f"--python-version={python}", *platforms]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"-d{scratch}"]
        try:
            done = subprocess.run(
                [*command, *options, f"{distribution}=={version}"], capture_output=True, text=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise NoWheel(f"{distribution} {version} did not come within {_SECONDS} seconds") from None
        found = list(Path(scratch).glob("*.whl"))
        if done.returncode or not found:
            raise NoWheel(f"{distribution} {version}: {done.stderr.strip()[-300:]}")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(unpacked, [n for n in wheel.namelist() if n.endswith(endings) and n.startswith(inside)])
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(unpacked, part)
        try:
            part.rename(folder)  # whole or not at all
        except OSError:  # another worker was first
            shutil.rmtree(part)
    return folder


def sources_or_skip(distribution: str, version: str, python: str | None = None, **kinds: Any) -> Path:
    """`sources`; without a network the test is skipped, or, where DSV41_REQUIRE_WHEELS is 1, fails."""
    try:
        return sources(distribution, version, python, **kinds)
    except NoWheel as error:
        if os.environ.get("DSV41_REQUIRE_WHEELS") == "1":
            raise
        pytest.skip(f"needs a wheel from PyPI: {error}")


def function(folder: Path, name: str) -> ast.FunctionDef:
    """The definition of `package.module.name`, also where a module or a package takes it from another of its own.

    Raises LookupError where there is none.
    """
    module, _, attribute = name.rpartition(".")
    return _find(folder, module, attribute, set())


def _find(folder: Path, module: str, attribute: str, seen: set[tuple[str, str]]) -> ast.FunctionDef:
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (module, attribute) not in seen and file.is_file():
        seen.add((module, attribute))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == attribute:
                return node
        for source, there in _imported(tree, module, attribute, is_package=path.is_dir()):
            try:
                return _find(folder, source, there, seen)
            except LookupError:
                continue
    raise LookupError(f"{attribute} is not defined in {module} of {folder.name}")


def _imported(tree: ast.Module, module: str, attribute: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """From which modules, and under which names, a module may have an attribute."""
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                if attribute == (alias.asname or alias.name):
                    yield source, alias.name
                elif alias.name == "*":
                    yield source, attribute


def signature(definition: ast.FunctionDef) -> inspect.Signature:
    """Names and kinds; every default is its source text."""
    given, kind = definition.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    parameters = [
        kind(
            argument.arg,
            kind.POSITIONAL_ONLY if argument in given.posonlyargs else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if default is None else ast.unparse(default),
        )
        for argument, default in zip(positional, defaults, strict=True)
    ]
    if given.vararg:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    parameters += [
        kind(argument.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ast.unparse(default))
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def literals(definition: ast.FunctionDef, parameter: str) -> set[object] | None:
    """The values that the annotation of a parameter allows, None where it is no Literal or there is no such one."""
    for argument in [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]:
        if argument.arg != parameter or argument.annotation is None:
            continue
        for node in ast.walk(argument.annotation):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
                values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return {ast.literal_eval(value) for value in values}
    return None
