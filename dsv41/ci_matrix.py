"""`ci/matrix.yaml`: what CI runs, one line an arch, and the jobs that follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import YAMLError

from dsv41.compile import OTHER_TARGETS, TARGETS
from dsv41.errors import Dsv41Error, InputError
from dsv41.hal.arch import ARCHS, vendor_of
from dsv41.hal.device import Platform
from dsv41.hal.names import suggest
from dsv41.hal.registry import all_specs

MATRIX = Path("ci/matrix.yaml")
"""Looked for where the command is run, which is the repository's root."""

Mode = Literal["run", "compile", "play-back"]
Version = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
Requirement = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.+:/@<>=~!,\[\]-]*$")]
"""What pip installs, with nothing in it that a shell would read otherwise."""


def _once(value: Any) -> Any:
    if isinstance(value, int | float):
        raise ValueError(f"{value} is a number to YAML: write it in quotes")
    return [value] if isinstance(value, str) else value


Once = BeforeValidator(_once)
"""One is as good as a list of one."""
Versions = Annotated[list[Version], Once]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Checked = TypeVar("_Checked", bound=_Strict)


class Defaults(_Strict):
    """What a line gets that does not say otherwise."""

    python: Versions
    torch: Versions
    triton: Versions


class Row(_Strict):
    """One line, completed by the defaults; `ci/matrix.yaml` says what its fields mean."""

    vendor: Literal["cpu", "nvidia", "amd"]
    arch: str
    mode: Annotated[list[Mode], Once]
    python: Versions
    torch: Versions
    triton: Versions
    platform: str | None = None
    backend: str | None = None
    install: Annotated[list[Requirement], Once] = []

    @model_validator(mode="after")
    def _fits(self) -> Row:
        vendor = vendor_of(self.arch)
        _demand(vendor == self.vendor, f"arch {self.arch!r} is of vendor {vendor!r}: write that")
        _demand(self.mode != [], "mode is empty: name run, compile or play-back")
        for python in self.python:
            promised = metadata.metadata("dsv41")["Requires-Python"]
            _demand(SpecifierSet(promised).contains(python), f"python {python} is not {promised}, as dsv41 asks")
        if "compile" in self.mode:
            known = (*TARGETS, *OTHER_TARGETS)
            _demand(self.arch in known, f"`dsv41 compile` knows no {self.arch}, only {', '.join(known)}: drop the mode")
        if "play-back" in self.mode:
            _demand(self.platform is not None, "play-back needs a platform: name a file in ci/platforms")
        if "play-back" in self.mode or ("run" in self.mode and self.vendor != "cpu"):
            _demand(self.backend is not None, "backend is missing: name the one that such a device must get")
        return self

    def jobs(self, torch_of_others: str) -> list[Job]:
        """Every combination of the fields that each mode reads. What does not run kernels does so beside that torch."""
        found = []
        for mode in self.mode:
            torches = self.torch if mode == "run" else [torch_of_others]
            tritons = self.triton if mode == "compile" else [None]
            for python, torch, triton in product(self.python, torches, tritons):
                found.append(
                    Job(
                        mode=mode,
                        vendor=self.vendor,
                        arch=self.arch,
                        python=python,
                        torch=torch,
                        triton=triton,
                        platform=self.platform,
                        backend=self.backend,
                        install=tuple(self.install),
                    )
                )
        return found


@dataclass(frozen=True)
class Job:
    """One thing that CI does. `torch` and `triton` are series, such as "2.13"; None is the Triton that torch brings."""

    mode: Mode
    vendor: str
    arch: str
    python: str
    torch: str
    triton: str | None = None
    platform: str | None = None
    backend: str | None = None
    install: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        version = {"run": f"-torch{self.torch}", "compile": f"-triton{self.triton}", "play-back": ""}[self.mode]
        return f"{self.mode}-{self.arch}-py{self.python}{version}"

    @property
    def needs_gpu(self) -> bool:
        return self.mode == "run" and self.vendor != "cpu"


def load_jobs(path: Path = MATRIX) -> list[Job]:
    """The jobs of a matrix, in its order.

    Raises InputError with the line of the first row that cannot be, for a file that is missing or no YAML, and for two
    rows that make the same job.
    """
    data = _read(path)
    if not isinstance(data, dict) or set(data) != {"defaults", "rows"} or not isinstance(data["rows"], CommentedSeq):
        raise InputError(f"{path} is no matrix: expected `defaults` and a list of `rows`; see docs/ci.md")
    defaults = _checked(Defaults, data["defaults"], f"{path}, defaults")
    seen: dict[str, str] = {}
    jobs = []
    for number, line in enumerate(data["rows"]):
        where = f"{path}, line {data['rows'].lc.item(number)[0] + 1}"
        if not isinstance(line, dict):
            raise InputError(f"{where}: {line!r} is no row: expected {{vendor: ..., arch: ..., mode: ...}}")
        row = _checked(Row, defaults.model_dump() | line, where)
        _check_beside(row, line, path.parent, where)
        for job in row.jobs(defaults.torch[0]):
            if job.name in seen:
                raise InputError(f"{where}: {job.name} is made by {seen[job.name]} already: drop it from one of them")
            seen[job.name] = where
            jobs.append(job)
    return jobs


def _read(path: Path) -> Any:
    try:
        return YAML().load(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}): run this at the root of a checkout of dsv41") from None
    except YAMLError as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())}; mend it") from None


def _checked(kind: type[_Checked], data: Any, where: str) -> _Checked:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        said = re.sub(r"^Value error, ", "", first["msg"])
        given = f", found {first['input']!r}" if field else ""
        raise InputError(f"{where}: {field}{': ' if field else ''}{said}{given}; see docs/ci.md") from None


def _check_beside(row: Row, line: dict[str, Any], folder: Path, where: str) -> None:
    """What the row alone does not show: what it was given in vain, and whether its platform has such a device."""
    if "triton" in line and "compile" not in row.mode:
        given = f"triton {line['triton']!r} without compile"
        raise InputError(f"{where}: {given}: other modes use the one that torch brings; drop it")
    try:
        # A platform may describe a new arch.
        require_known(row.arch if row.platform is None else "cpu", row.backend)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if row.platform is not None:
        try:
            platform = platform_of(row.platform, folder)
        except Dsv41Error as error:
            raise InputError(f"{where}: {error}") from None
        if row.arch not in (device.arch for device in platform.devices):
            found = ", ".join(device.arch for device in platform.devices)
            raise InputError(f"{where}: platform {row.platform!r} has {found}: expected {row.arch}; name another")


def require_known(arch: str = "cpu", backend: str | None = None) -> None:
    """Raises InputError for an arch that is in no table, and for a backend that is not installed."""
    if arch != "cpu" and arch not in ARCHS:
        known = ", ".join(("cpu", *ARCHS))
        raise InputError(f"arch {arch!r} is unknown: {suggest(arch, ARCHS)}use one of {known}")
    names = [spec.name for spec in all_specs()]
    if backend is not None and backend not in names:
        raise InputError(f"backend {backend!r} is unknown: {suggest(backend, names)}use one of {', '.join(names)}")


def platform_of(name: str, folder: Path = MATRIX.parent) -> Platform:
    """The platform of that name beside the matrix in `folder`. Raises Dsv41Error where it is none."""
    return Platform.load(str(folder / "platforms" / f"{name}.json"))


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
