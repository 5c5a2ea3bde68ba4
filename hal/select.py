"""How a backend is picked: the argument, then `DSV41_BACKEND`, then the best one that can run.

Every backend is judged for the real shape and every phase before a weight is touched. A backend asked for by name is
returned or refused with its reasons; nothing else is ever put in its place.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsv41.errors import BackendError, ConfigError, Dsv41Error
from dsv41.hal import registry
from dsv41.hal.device import TORCH_VENDORS, Device, Platform
from dsv41.hal.names import suggest
from dsv41.hal.paths import taken
from dsv41.hal.probe import deep_check, probe
from dsv41.hal.registry import BackendSpec
from dsv41.hal.report import Candidate, SelectionReport
from dsv41.hal.request import PHASES, REASON_CLASSES, UNSPECIFIC_KV_CACHE_DTYPES, Reason, Request
from dsv41.hal.requirements import Check, index_cache_dtype, kv_cache_dtype, torch_reaches

if TYPE_CHECKING:
    import torch

    from dsv41.hal.backend import AttentionBackend

__all__ = ["ENV_BACKEND", "SelectionReport", "SlowBackendWarning", "explain_backends", "judge", "select_backend"]

ENV_BACKEND = "DSV41_BACKEND"
MENDABLE = ("platform", "library", "switch")
"""Classes of reasons that a person can remove on the same machine."""

_log = logging.getLogger("dsv41")
_warned: set[tuple[str, str]] = set()


class SlowBackendWarning(UserWarning):
    """An automatic choice that leaves most of the device's speed unused."""


def select_backend(
    name: str | None = None,
    *,
    device: str | torch.device | Device | None = None,
    config: Any = None,
    tp_size: int = 1,
    kv_cache_dtype: str = "auto",
    index_cache_dtype: str = "auto",
    phases: Iterable[str] = ("decode", "prefill"),
    cache_bytes: int | None = None,
    platform: Platform | None = None,
) -> AttentionBackend:
    """A ready backend, judged for the real shape and every phase; `backend.selection` holds the report.

    `name` is a backend, or None or "auto" for the environment's or the best one. `device` None is the first GPU that
    torch can use, else the CPU. `config` is anything with a `geometry`; None is the released model. `cache_bytes` is
    the largest cache that will be bound, where it is known. `platform` None is this machine.

    Raises BackendError for an unknown backend, device or phase and for a backend that cannot run, with its reasons and
    the nearest thing that would work; ConfigError or LayoutError for a shape or format that cannot be.
    """
    choice = _Choice.make(
        name, device, config, tp_size, kv_cache_dtype, index_cache_dtype, phases, cache_bytes, platform
    )
    while True:
        report = choice.settle()
        for candidate in report.candidates:
            _log.debug("%s: %s", candidate.name, "; ".join(map(str, candidate.reasons)) or "usable")
        if report.chosen is None:
            raise BackendError(choice.refusal(report))
        if choice.played_back:
            _require_present(report.device, choice.platform)
        spec = choice.specs[report.chosen]
        try:
            backend_class = registry.load(spec)
        except BackendError as error:
            choice.exclude(spec.name, Reason("bug", f"{error}. Report it to the author of {spec.name}"))
            continue
        try:
            backend = backend_class(
                device=report.device.torch_device,
                kv_cache_dtype=kv_cache_dtype,
                index_cache_dtype=index_cache_dtype,
                facts=report.device,
            )
        except Dsv41Error as error:
            choice.exclude(report.chosen, Reason("dtype", f"{error}. Ask for another format or another backend"))
            continue
        except Exception as error:
            text = f"it fails to start with {type(error).__name__}: {error}. Report it with the output of `dsv41 probe`"
            _log.debug("%s", text, exc_info=True)
            choice.exclude(report.chosen, Reason("bug", text))
            continue
        backend.selection = report
        _announce(choice, report)
        return backend


def explain_backends(
    name: str | None = None,
    *,
    device: str | torch.device | Device | None = None,
    config: Any = None,
    tp_size: int = 1,
    kv_cache_dtype: str = "auto",
    index_cache_dtype: str = "auto",
    phases: Iterable[str] = ("decode", "prefill"),
    cache_bytes: int | None = None,
    platform: Platform | None = None,
) -> SelectionReport:
    """The report that `select_backend` would make, without loading a backend.

    A backend asked for by name that cannot run leaves `chosen` None. Raises as `select_backend` does for arguments
    that name nothing.
    """
    return _Choice.make(
        name, device, config, tp_size, kv_cache_dtype, index_cache_dtype, phases, cache_bytes, platform
    ).settle()


@dataclass
class _Choice:
    """One selection in progress: its inputs, and what was found to be unusable on the way."""

    request: Request
    device: Device
    platform: Platform
    played_back: bool
    asked: str | None
    source: str
    specs: Mapping[str, BackendSpec]

    @staticmethod
    def make(
        name: str | None,
        device: Any,
        config: Any,
        tp_size: int,
        kv_cache_dtype: str,
        index_cache_dtype: str,
        phases: Iterable[str],
        cache_bytes: int | None,
        platform: Platform | None,
    ) -> _Choice:
        from dsv41.hal.types import Geometry

        specs = {spec.name: spec for spec in registry.all_specs()}
        asked, source = _asked(name, specs)
        geometry = Geometry() if config is None else getattr(config, "geometry", None)
        if not isinstance(geometry, Geometry):
            raise ConfigError(
                f"config is {config!r:.200}: expected something with a `geometry`; pass a DeepseekV41Config, or None "
                "for the released model"
            )
        if not isinstance(phases, Iterable):
            raise BackendError(f"phases is {phases!r}: expected a list of phases; use some of {', '.join(PHASES)}")
        if platform is not None and not isinstance(platform, Platform):
            raise BackendError(
                f"platform is {platform!r:.200}: expected a Platform; pass Platform.load('h200'), say, or None for "
                "this machine"
            )
        request = Request(
            geometry=geometry,
            tp_size=tp_size,
            kv_cache_dtype=kv_cache_dtype,
            index_cache_dtype=index_cache_dtype,
            phases=(phases,) if isinstance(phases, str) else tuple(phases),
            cache_bytes=cache_bytes,
        )
        here = _confirm_suspects(probe()) if platform is None else platform
        key = device.key if isinstance(device, Device) else None if device is None else str(device)
        return _Choice(request, here.device(key), here, platform is not None, asked, source, specs)

    def settle(self) -> SelectionReport:
        """Judge every backend, and check the libraries of the one that comes out, until one stands."""
        while True:
            candidates = tuple(self.judge(spec) for spec in self.specs.values())
            usable = [c.name for c in candidates if c.usable and self.asked in (None, c.name)]
            if not usable or self.played_back or self._libraries_import(self.specs[usable[0]]):
                break
        return SelectionReport(
            request=self.request,
            device=self.device,
            source=self.source,
            asked=self.asked,
            chosen=usable[0] if usable else None,
            intended=next((c.name for c in candidates if c.only("planned", "platform")), None),
            candidates=candidates,
            notes=self.platform.notes,
        )

    def judge(self, spec: BackendSpec, device: Device | None = None, kv_cache_dtype: str | None = None) -> Candidate:
        """One backend for this request, or for one that differs in its device or format."""
        request = replace(self.request, kv_cache_dtype=kv_cache_dtype) if kv_cache_dtype else self.request
        return judge(spec, device or self.device, self.platform, request, self.specs.values())

    def _libraries_import(self, spec: BackendSpec) -> bool:
        """Whether the libraries of a backend import; one that does not becomes a reason."""
        for library in spec.libraries:
            facts = self.platform.library(library)
            problem = facts.problem or deep_check(library)
            if problem and facts.problem is None:
                self.platform = self.platform.with_library(library, replace(facts, problem=problem))
            elif problem:  # no requirement of the backend speaks of this library
                self.exclude(spec.name, Reason("library", f"{library} cannot be used: {problem}. Reinstall it"))
            if problem:
                return False
        return True

    def exclude(self, name: str, reason: Reason) -> None:
        self.specs = {**self.specs, name: replace(self.specs[name], fault=reason)}

    def refusal(self, report: SelectionReport) -> str:
        """Why nothing was chosen, and the nearest thing that would work."""
        if self.asked is None:
            return f"no backend can run on {self.device.key}\n{report}"
        reasons = "\n".join(f"  - {reason}" for reason in report.candidate(self.asked).reasons)
        by = f", which {ENV_BACKEND} names," if self.source == ENV_BACKEND else ""
        return (
            f"backend {self.asked!r}{by} cannot run on {self.device.key} ({self.device.name}, {self.device.arch}) with "
            f"{self.request}:\n{reasons}\n{self._nearest(report)}"
        )

    def _nearest(self, report: SelectionReport) -> str:
        assert self.asked is not None
        spec = self.specs[self.asked]
        for dtype in spec.kv_cache_dtypes:
            if self.judge(spec, kv_cache_dtype=dtype).usable:
                return f"It would run here with kv_cache_dtype={dtype!r}."
        for device in self.platform.devices:
            if self.judge(spec, device).usable:
                return f"It would run on device {device.key!r} ({device.name})."
        usable = [candidate.name for candidate in report.candidates if candidate.usable]
        if usable:
            return f"What can run this here: {', '.join(usable)}."
        return "No other backend can run this here either."


def judge(
    spec: BackendSpec, device: Device, platform: Platform, request: Request, known: Iterable[BackendSpec] = ()
) -> Candidate:
    """Ask all requirements of one backend. A check that raises is a reason too: a bug of that backend.

    `known` are the backends to name where this one cannot read a format.
    """
    reasons: list[Reason] = [spec.fault] if spec.fault else []
    remarks: list[str] = []
    for check in () if spec.fault else (*_common_checks(spec), *spec.requirements):
        try:
            reason = check(device, platform, request)
            if not isinstance(reason, Reason | None):
                raise TypeError(f"it answers {reason!r} where a Reason or None is due")
            remark = getattr(check, "remark", None)
            if remark and (text := remark(device, platform, request)):
                remarks.append(text)
        except Exception as error:
            text = (
                f"one of its checks fails with {type(error).__name__}: {error}. Report it to the author of {spec.name}"
            )
            reason = Reason("bug", text)
        if reason and reason.cls == "dtype":
            reason = _with_readers(reason, request, known)
        if reason and reason not in reasons:
            reasons.append(reason)
    if any(reason.cls == "arch" for reason in reasons):
        reasons = [_on_another_device(reason) for reason in reasons]
    reasons.sort(key=lambda reason: REASON_CLASSES.index(reason.cls))
    paths = {} if reasons else taken(spec.paths, device, platform, request)
    return Candidate(spec.name, spec.summary, tuple(reasons), tuple(remarks), paths)


def _common_checks(spec: BackendSpec) -> tuple[Check, ...]:
    return (
        _is_contained(spec),
        _speaks_this_contract(spec),
        torch_reaches(),
        kv_cache_dtype(*spec.kv_cache_dtypes, *UNSPECIFIC_KV_CACHE_DTYPES),
        index_cache_dtype(*spec.index_cache_dtypes, "auto"),
    )


def _is_contained(spec: BackendSpec) -> Check:
    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        if spec.target is not None:
            return None
        from dsv41 import __version__

        return Reason(
            "planned",
            f"dsv41 {__version__} does not contain it yet: upgrade dsv41 once a version does; others run until then",
        )

    return check


def _speaks_this_contract(spec: BackendSpec) -> Check:
    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        from dsv41.hal.backend import CONTRACT_VERSION

        if spec.contract_version == CONTRACT_VERSION:
            return None
        return Reason(
            "library",
            f"was written for contract version {spec.contract_version}, this dsv41 has {CONTRACT_VERSION}: install "
            "versions of both that match",
        )

    return check


def _on_another_device(reason: Reason) -> Reason:
    """Advice to install something must not sound as if it helped on a device that the kernels do not run on."""
    return replace(reason, text=f"{reason.text}. This alone does not help here") if reason.cls == "library" else reason


def _with_readers(reason: Reason, request: Request, known: Iterable[BackendSpec]) -> Reason:
    names = registry.readers(request.kv_cache_dtype, known)
    if request.kv_cache_dtype in UNSPECIFIC_KV_CACHE_DTYPES or not names or "kv_cache_dtype" not in reason.text:
        return reason
    return replace(reason, text=f"{reason.text}, or use a backend that reads it: {', '.join(names)}")


def _asked(name: str | None, specs: Mapping[str, BackendSpec]) -> tuple[str | None, str]:
    """The backend asked for, None for the best one, and by whom. An empty variable is an unset one."""
    source = "argument"
    wanted = name
    if wanted is None:
        source, wanted = ENV_BACKEND, os.environ.get(ENV_BACKEND, "").strip() or "auto"
    wanted = str(wanted).strip().lower()
    if wanted == "auto":
        return None, "automatic"
    if wanted not in specs:
        given = name if source == "argument" else os.environ[ENV_BACKEND]
        by = "" if source == "argument" else f" in {ENV_BACKEND}"
        raise BackendError(f"backend {given!r}{by} is unknown: {suggest(wanted, specs)}use auto, {', '.join(specs)}")
    return wanted, source


def _confirm_suspects(platform: Platform) -> Platform:
    """Import, in a subprocess, what lies on the path under a library's name and no distribution vouches for."""
    for name, facts in platform.libraries.items():
        if facts.installed and facts.version is None and (problem := deep_check(name)):
            platform = platform.with_library(name, replace(facts, problem=problem))
    return platform


def _require_present(device: Device, platform: Platform) -> None:
    import torch

    if device.vendor in TORCH_VENDORS and device.index >= torch.cuda.device_count():
        raise BackendError(
            f"device {device.key} ({device.name}) of platform {platform.origin or 'given'!r} is not on this machine: "
            "use explain_backends to see what it would get, or device='cpu'"
        )


def _announce(choice: _Choice, report: SelectionReport) -> None:
    _log.info("attention backend: %s", report.line)
    if choice.source != "automatic" or (report.device.key, str(report.chosen)) in _warned:
        return
    if advice := _slow_advice(choice, report):
        _warned.add((report.device.key, str(report.chosen)))
        warnings.warn(advice, SlowBackendWarning, stacklevel=3)


def _slow_advice(choice: _Choice, report: SelectionReport) -> str | None:
    """What would make this device faster, None where nothing would."""
    better = report.candidates[: [candidate.name for candidate in report.candidates].index(str(report.chosen))]
    if mendable := [candidate for candidate in better if candidate.only(*MENDABLE)]:
        ways = "; ".join(f"{c.name}: {' '.join(reason.text for reason in c.reasons)}" for c in mendable)
        return f"{report.chosen} is not the fastest backend for {report.device.name}. {ways}"
    if report.device.is_gpu and choice.specs[str(report.chosen)].slow_on_gpu:
        later = [candidate.name for candidate in better if candidate.only("planned", *MENDABLE)]
        return (
            f"{report.chosen} runs on {report.device.name}, slowly: this version of dsv41 has nothing faster for it. "
            f"Later ones bring {', '.join(later) or 'nothing that is known yet'}; `dsv41 probe` says what each needs"
        )
    unreached = [gpu for gpu in choice.platform.gpus if choice.platform.reach_problem(gpu)]
    if unreached and not report.device.is_gpu and not _hides_gpus(choice.platform):
        return f"running on the CPU although {unreached[0].name} is here: {choice.platform.reach_problem(unreached[0])}"
    return None


def _hides_gpus(platform: Platform) -> bool:
    """Whether the user hides every GPU on purpose."""
    return any(name.endswith("VISIBLE_DEVICES") and value in ("", "-1") for name, value in platform.environment.items())
