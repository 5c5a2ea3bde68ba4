"""What a backend says of itself: padded heads, cache layouts, properties. Nothing is computed."""

from __future__ import annotations

import json

import torch

from dsv41.errors import BackendError, LayoutError
from dsv41.hal.backend import CONTRACT_VERSION
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache
from dsv41.hal.probe import probe
from dsv41.hal.records import RECORDS
from dsv41.hal.registry import BackendSpec
from dsv41.hal.request import (
    INDEX_CACHE_DTYPES,
    KV_CACHE_DTYPES,
    UNQUANTISED,
    UNSPECIFIC_KV_CACHE_DTYPES,
    Request,
)
from dsv41.hal.select import judge
from dsv41.hal.types import Geometry
from dsv41.testing import presets
from dsv41.testing.caches import layer_caches
from dsv41.testing.case import Case
from dsv41.testing.clause import Inapplicable, Violation, expect
from dsv41.testing.subject import Subject
from dsv41.testing.tolerances import row_bound

_FLAGS = (
    "accepts_unnormed_unroped_query",
    "supports_graph_capture",
    "replays_window",
    "trusts_cache_bytes",
)
_RELEASED_HEADS = (64, 32, 16, 8)


def padded_heads(subject: Subject, case: Case) -> None:
    backend = subject.plain
    for heads in range(1, 129):
        try:
            padded = backend.get_padded_num_q_heads(heads)
        except BackendError:
            continue
        except Exception as error:
            raise Violation(
                f"get_padded_num_q_heads({heads}) raises {type(error).__name__}: {error}; expected a number, or "
                "BackendError for a count that it cannot run"
            ) from error
        expect(
            type(padded) is int and padded >= heads,
            f"get_padded_num_q_heads({heads}) is {padded!r}: expected a whole number of at least {heads}",
        )
        again = backend.get_padded_num_q_heads(heads)
        expect(padded == again, f"get_padded_num_q_heads({heads}) is {padded}, and {again} when asked again")


def released_heads(subject: Subject, case: Case) -> None:
    expect(
        any(subject.padded(heads) is not None for heads in _RELEASED_HEADS),
        f"it refuses {', '.join(map(str, _RELEASED_HEADS))} heads: expected one of these, which the release has on 1 "
        "to 8 ranks",
    )


def names_resolve(subject: Subject, case: Case) -> None:
    for what, names in (("kv", KV_CACHE_DTYPES), ("index", INDEX_CACHE_DTYPES)):
        for name in (*names, "no-such-format"):
            asked = {"kv": "auto", "index": "auto"} | {what: name}
            try:
                backend = subject.fresh(asked["kv"], asked["index"])
            except LayoutError:
                continue
            except Exception as error:
                raise Violation(
                    f"{what} cache dtype {name!r} raises {type(error).__name__}: {error}; expected LayoutError where "
                    "it is refused"
                ) from error
            found = {"kv": backend.kv_cache_dtype, "index": backend.index_cache_dtype}[what]
            expect(
                found in names and found != "auto" and (what == "index" or found not in UNSPECIFIC_KV_CACHE_DTYPES),
                f"{what} cache dtype {name!r} becomes {found!r}: expected a specific name of {', '.join(names)}",
            )
            expect(
                name != "no-such-format", f"{what} cache dtype {name!r} is taken, as {found!r}: expected LayoutError"
            )
            expect(
                isinstance(backend.layouts, CacheLayouts), f"layouts is {backend.layouts!r:.80}: expected CacheLayouts"
            )


def auto_is_declared(subject: Subject, case: Case) -> None:
    if not subject.takes():
        raise Inapplicable("it refuses 'auto'")
    backend = subject.plain
    declared, found = backend.packed_kv_cache_dtype, backend.kv_cache_dtype
    expect(found == declared, f"'auto' becomes {found!r}, packed_kv_cache_dtype is {declared!r}: expected the same")


def names_are_stable(subject: Subject, case: Case) -> None:
    for kv in subject.kv_cache_dtypes:
        backend = subject.backend(kv, "auto")
        for index in subject.index_cache_dtypes:
            again = backend.resolve_layouts(kv, index)
            expect(
                again[:2] == (kv, index),
                f"resolve_layouts({kv!r}, {index!r}) names {again[:2]}: expected what was asked",
            )
        same = backend.resolve_layouts(backend.kv_cache_dtype, backend.index_cache_dtype)[2]
        expect(same == backend.layouts, f"resolve_layouts({kv!r}) gives other layouts than the backend was made with")


def layouts_are_whole(subject: Subject, case: Case) -> None:
    layouts = subject.backend(case.kv, case.index).layouts
    for what, layout, dim in (
        ("window", layouts.window, 512),
        ("compressed", layouts.compressed, 512),
        ("index", layouts.index, 128),
    ):
        record = layout.record
        expect(record.dim == dim, f"the {what} record {record.name} has {record.dim} dims: expected {dim}")
        expect(
            RECORDS.get(record.name) == record,
            f"the {what} record {record.name} is not in RECORDS under that name: add it there, so that caches can be "
            "described and moved",
        )
        told = CacheLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
        expect(told == layout, f"the {what} layout does not survive to_dict and from_dict: {told.describe()}")
        _keeps_rows(what, layout, subject)


def _keeps_rows(what: str, layout: CacheLayout, subject: Subject) -> None:
    cache = PagedCache.allocate(layout, 3, subject.device, fill=0xFF)
    slots = torch.randperm(cache.num_slots, generator=torch.Generator().manual_seed(1))[:24]
    rows = presets.rows("outliers", len(slots), layout.record.dim, subject.seed).to(subject.device)
    cache.write(slots.to(subject.device), rows)
    found = cache.read(slots.to(subject.device))
    bound = row_bound(layout.record, rows, torch.float32, cache.tensor_scale)
    wrong = int((~((found - rows).abs() <= bound)).sum())  # NaN is wrong too
    expect(
        wrong == 0, f"{wrong} numbers of {len(slots)} rows come back from the {what} layout further off than its record"
    )


def own_caches_taken(subject: Subject, case: Case) -> None:
    backend = subject.backend(case.kv, case.index)
    layer = subject.layer(backend, case)
    try:
        layer_caches(layer, backend.layouts, {"window": 2, "compressed": 2}, 1)
    except LayoutError as error:
        raise Violation(f"check_caches refuses caches of the backend's own layouts: {error}") from error


def properties(subject: Subject, case: Case) -> None:
    backend = subject.plain
    found = backend.contract_version
    expect(found == CONTRACT_VERSION, f"contract_version is {found!r}: expected {CONTRACT_VERSION}, dsv41's")
    expect(isinstance(backend.name, str) and bool(backend.name), f"name is {backend.name!r}: expected a name")
    for flag in _FLAGS:
        value = getattr(backend, flag)
        expect(type(value) is bool, f"{flag} is {value!r}: expected True or False")
    overlap = backend.max_tokens_for_overlap
    expect(
        type(overlap) is int and overlap >= 0,
        f"max_tokens_for_overlap is {overlap!r}: expected a whole number, 0 = never",
    )
    packed = backend.packed_kv_cache_dtype
    expect(
        packed in KV_CACHE_DTYPES and packed not in UNSPECIFIC_KV_CACHE_DTYPES,
        f"packed_kv_cache_dtype is {packed!r}: expected a specific name of {', '.join(KV_CACHE_DTYPES)}",
    )
    expect(
        backend.device.type == subject.device.type,
        f"it was made for {subject.device} and is on {backend.device}: expected the same",
    )


def agrees_with_its_spec(subject: Subject, case: Case) -> None:
    if subject.spec is None:
        raise Inapplicable("it is not registered")
    spec, backend = subject.spec, subject.plain
    for what, told, found in (
        ("name", spec.name, backend.name),
        ("packed_kv_cache_dtype", spec.packed_kv_cache_dtype, backend.packed_kv_cache_dtype),
        ("contract_version", spec.contract_version, backend.contract_version),
    ):
        expect(told == found, f"its BackendSpec says {what} {told!r}, the class {found!r}: expected the same")
    for named, taken in (
        (spec.kv_cache_dtypes, subject.kv_cache_dtypes),
        (spec.index_cache_dtypes, subject.index_cache_dtypes),
    ):
        # Unquantised rows are for exact comparisons: a class may take them though selection does not offer them.
        extra = [name for name in taken if name not in named and name != UNQUANTISED]
        expect(
            not extra, f"it takes {', '.join(extra)}, which its BackendSpec does not name: expected all of them there"
        )
    for heads in _RELEASED_HEADS:
        told = _told_heads(subject, spec, heads)
        expect(
            not told or subject.padded(heads) is not None,
            f"its BackendSpec has nothing against {heads} heads, the class refuses them: expected the same",
        )


def _told_heads(subject: Subject, spec: BackendSpec, heads: int) -> bool:
    """Whether selection takes so many heads on a rank of the release for a shape that the backend runs."""
    released = Geometry()
    request = Request(released, tp_size=released.num_heads // heads)
    device = subject.facts or Device.cpu(str(subject.device))
    return not any(reason.cls == "shape" for reason in judge(spec, device, probe(), request).reasons)
