"""A kernel of ours as PTX, by NVRTC alone: cuda.core asks the driver before it gives PTX, and here there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv41.backends.cuda import nvrtc


def ptx(name: str, arch: str, defines: Mapping[str, int]) -> str:
    """The PTX of `backends/cuda/kernels/<name>.cu`. Raises RuntimeError with the compiler's words."""
    return of_source(nvrtc.source(name), arch, defines)


def of_source(text: str, arch: str, defines: Mapping[str, int]) -> str:
    from cuda.bindings import nvrtc as library

    def checked(answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status):
            raise RuntimeError(f"NVRTC: {status.name}")
        return values[0] if values else None

    program = checked(library.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    (status,) = library.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        log = b" " * checked(library.nvrtcGetProgramLogSize(program))
        checked(library.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode().strip("\0 "))
    code = b" " * checked(library.nvrtcGetPTXSize(program))
    checked(library.nvrtcGetPTX(program, code))
    return code.decode().rstrip("\0")
