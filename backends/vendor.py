"""Calls into kernel libraries: what one says when it fails, together with what we asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv41.errors import BackendError


def load(module: str, install: str) -> Any:
    """Import a library's module. Raises BackendError with what went wrong and the command that mends it."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"{module} cannot be imported ({type(error).__name__}: {error}): expected a build that fits this torch; "
            f"{install}"
        ) from error


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """`function(**arguments)`. Raises BackendError with the library's words and with the arguments, as shapes. A lack
    of memory stays what it is, since an engine can do something about it."""
    try:
        return function(**arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__name__', function)}"
        raise BackendError(
            f"{name} failed with {type(error).__name__}: {error}. It was given {words(arguments)}"
        ) from error


def expect_bfloat16(reader: str, q: Tensor) -> None:
    """Raise BackendError for queries in a type that the library of the backend `reader` has no attention for."""
    if q.dtype != torch.bfloat16:
        raise BackendError(
            f"{reader} was given queries in {q.dtype}: expected bfloat16, which its library takes; load the checkpoint "
            "with dtype=torch.bfloat16, or use the portable backend"
        )


def words(arguments: Mapping[str, Any]) -> str:
    """Arguments in words: tensors by dtype, shape, strides and device, other values as they are."""
    return ", ".join(f"{name} = {_word(value)}" for name, value in arguments.items())


def _word(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)} strides {list(value.stride())} on {value.device}"
