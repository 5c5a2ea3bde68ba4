"""CUDA C++ of ours: compiled by NVRTC, which torch's CUDA wheels bring, and kept on disk, so no compiler is needed."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from dsv41.errors import BackendError

INSTALL = "`pip install -U 'cuda-core[cu13]>=1.0'`"
_STANDARD = "c++17"
_ELF = b"\x7fELF"


def source(name: str) -> str:
    """The text of `backends/cuda/kernels/<name>.cu`, with that of the files beside it that it includes."""
    return _text(f"{name}.cu")


def _text(file: str) -> str:
    text = files("dsv41.backends.cuda").joinpath("kernels", file).read_text()
    return re.sub(r'^#include "(.+)"$', lambda include: _text(include[1]), text, flags=re.MULTILINE)


def cubin(name: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """The machine code of a kernel for `arch`, such as "sm_90a", with macros defined: from the cache, or compiled.

    A cache that cannot be read or written costs a compilation in each process. Raises BackendError where NVRTC is
    missing or refuses the source.
    """
    kept = kept_at(name, arch, defines)
    with suppress(OSError):
        if (code := kept.read_bytes()).startswith(_ELF):
            return code
    code = _compile(name, source(name), arch, defines)
    try:
        _keep(kept, code)
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {kept.parent} ({error}), so every process compiles them: set "
            "DSV41_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )
    return code


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all, whoever else compiles the same; for everyone to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(code)
    try:
        os.chmod(part.name, 0o644)
        os.replace(part.name, path)
    except OSError:
        os.unlink(part.name)
        raise


def kept_at(name: str, arch: str, defines: Mapping[str, int]) -> Path:
    """The file of the cache in which `cubin` keeps this build. Raises BackendError where NVRTC is missing."""
    key = hashlib.sha256(
        repr((source(name), arch, _STANDARD, sorted(defines.items()), _version())).encode()
    ).hexdigest()
    return cache_folder() / f"{name}-{arch}-{key[:24]}.cubin"


def missing() -> str | None:
    """Why no kernel can be compiled here; None where one can."""
    try:
        _version()
    except BackendError as error:
        return str(error)
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept: `DSV41_CACHE_DIR`, or `dsv41` in the user's cache folder."""
    if folder := os.environ.get("DSV41_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dsv41"


def _compile(name: str, text: str, arch: str, defines: Mapping[str, int]) -> bytes:
    core = _core()
    try:
        options = core.ProgramOptions(
            name=f"{name}.cu",
            arch=arch,
            std=_STANDARD,
            define_macro=[(key, str(value)) for key, value in defines.items()],
        )
        code = core.Program(text, "c++", options).compile("cubin").code
    except Exception as error:
        raise BackendError(
            f"{name}.cu does not compile for {arch} with {dict(defines)} ({type(error).__name__}: {error}): expected "
            f"the NVRTC of CUDA 13, which knows {arch}; {INSTALL}"
        ) from error
    return bytes(code)


@cache
def _core() -> Any:
    try:
        import cuda.core

        for name in ("LEGACY_DEFAULT_STREAM", "LaunchConfig", "ObjectCode", "Program", "ProgramOptions", "launch"):
            getattr(cuda.core, name)  # which older versions lack
        return cuda.core
    except Exception as error:
        raise BackendError(
            f"cuda.core cannot be imported ({type(error).__name__}: {error}), which compiles and launches our CUDA "
            f"kernels: expected it with NVRTC; {INSTALL}"
        ) from error


@cache
def _version() -> tuple[int, int]:
    _core()
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # whatever the search for its shared library raises
        raise BackendError(f"NVRTC cannot be loaded ({error}): expected that of CUDA 13; {INSTALL}") from error
    if int(status):
        raise BackendError(f"NVRTC does not tell its version ({status.name}): expected a working one; {INSTALL}")
    return major, minor
