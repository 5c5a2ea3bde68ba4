"""From the source of a kernel to PTX, and from PTX to a shared library of this machine. Both are kept on disk."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsv41.backends.cuda import nvrtc

from . import ptx, translate

_HERE = Path(__file__).parent
_OPTIONS = (
    "-std=c++17", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno",
    "-U_FORTIFY_SOURCE", f"-I{_HERE}",
)  # fmt: skip


def missing() -> str | None:
    """Why no kernel can be emulated here; None where one can."""
    if shutil.which("g++") is None:
        return "needs g++, which compiles kernels for this machine"
    return nvrtc.missing()


def compile_to_ptx(name: str, text: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """PTX of CUDA C++. Raises RuntimeError with what NVRTC says where it refuses it."""
    from cuda.bindings import nvrtc as library

    _, major, minor = library.nvrtcVersion()
    kept = _folder() / f"{name}-{_key(text, arch, sorted(defines.items()), major, minor)}.ptx"
    if kept.exists():
        return kept.read_bytes()
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    _, program = library.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], [])
    (status,) = library.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        _, size = library.nvrtcGetProgramLogSize(program)
        log = b" " * size
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name}.cu does not compile: {log.decode()}")
    _, size = library.nvrtcGetPTXSize(program)
    code = b" " * size
    library.nvrtcGetPTX(program, code)
    library.nvrtcDestroyProgram(program)
    code = code.rstrip(b"\0")
    _keep(kept, code)
    return code


def compile_kernel(kernel: ptx.Kernel, shared_start: dict[str, int]) -> ctypes.CDLL:
    """The library that runs `kernel`. Raises RuntimeError where g++ refuses it."""
    text = translate.translate(kernel, shared_start)
    machine = _machine()
    path = _folder() / f"{kernel.name}-{_key(text, machine.name, _OPTIONS)}.so"
    if not path.exists():
        _compile(["-O1", "-w", "-shared", "-x", "c++", "-", "-x", "none", str(machine)], text, path)
    return ctypes.CDLL(str(path))


def _machine() -> Path:
    source = (_HERE / "machine.cpp").read_text()
    path = _folder() / f"machine-{_key(source, (_HERE / 'machine.hpp').read_text(), _OPTIONS)}.o"
    if not path.exists():
        _compile(["-O2", "-c", "-x", "c++", "-"], source, path)
    return path


def _compile(arguments: list[str], text: str, to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / to.name
        command = ["g++", *_OPTIONS, *arguments, "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ does not compile {to.stem}: {done.stderr[:4000]}")
        _keep(to, made.read_bytes())


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dsv41-emulator-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all, whoever else does the same."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(code)
    os.replace(part.name, path)
