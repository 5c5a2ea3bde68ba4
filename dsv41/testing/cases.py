"""The cases of each clause: few and small in quick form, since an interpreter takes a second for a token.

Lengths are in terms of the model's window and top-k, so that they lie below, at and beyond both in every geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dsv41.testing.caches import VARIANTS
from dsv41.testing.case import Case, Requests
from dsv41.testing.geometry import ROLES
from dsv41.testing.presets import PRESETS
from dsv41.testing.subject import Subject

Cases = list[Case]


def _lengths(subject: Subject) -> tuple[int, int]:
    """The window, and a length beyond it at which a selection leaves rows out, of either ratio."""
    config = subject.config(8)
    return config.sliding_window, config.sliding_window + 2 * config.index_topk + 3


def _base(subject: Subject, requests: Requests, **options: object) -> Case:
    return replace(Case(heads=subject.default_heads, requests=requests), **options)  # type: ignore[arg-type]


def _lean(subject: Subject, requests: Requests, **options: object) -> Case:
    """With the fewest heads, for what has nothing to do with heads."""
    return replace(_base(subject, requests, **options), heads=subject.head_counts[0])


def once(subject: Subject, full: bool) -> Cases:
    return [_base(subject, ((5, 1),))]


def each_dtype(subject: Subject, full: bool) -> Cases:
    """Each KV format beside the default index format, and each index format beside the default KV format."""
    case = once(subject, full)[0]
    kinds = [replace(case, kv=kv, layer="source") for kv in subject.kv_cache_dtypes]
    return kinds + [replace(case, index=index, layer="source") for index in subject.index_cache_dtypes]


# Steps


def _several(subject: Subject) -> Requests:
    """A request that begins, one that goes on beyond the window, and one whose group of two stays open."""
    _, long = _lengths(subject)
    return ((0, 2), (long, 1), (5, 2))


def _on_layers(*layers: str) -> Callable[[Subject, bool], Cases]:
    """A step of several requests with padding behind, on each of these layers; in full also on other distributions
    and in other formats."""

    def cases(subject: Subject, full: bool) -> Cases:
        # More than one head in one of them, so that a short check is soon done.
        found = [
            (_base if layer == "source2" else _lean)(subject, _several(subject), layer=layer, padding=1)
            for layer in layers
        ]
        if full:
            found += [replace(case, preset=preset) for case in found for preset in PRESETS if preset != "normal"]
            found += [replace(found[0], kv=kv) for kv in subject.kv_cache_dtypes]
            found += [replace(found[0], index=index) for index in subject.index_cache_dtypes]
        return found

    return cases


prepared = _on_layers("window", "source2", "source")
compressing = _on_layers("source2", "source")
pooling = _on_layers("source2")
window_only = _on_layers("window")
publishing = _on_layers("source")
reading = _on_layers("reader")


def quantising(subject: Subject, full: bool) -> Cases:
    found = [_lean(subject, ((6, 1),), layer="window", quantize=True)]
    return [*found, *(replace(found[0], layer=layer) for layer in ("source2", "source"))] if full else found


def keyed(subject: Subject, full: bool) -> Cases:
    """Also steps in which all that is visible is selected: keys are written all the same, for later ones."""
    short = [_lean(subject, ((0, 3), (1, 1)), layer=layer) for layer in ("source2", "source")]
    return [*compressing(subject, full), *short]


def scoring(subject: Subject, full: bool) -> Cases:
    found = _on_layers("source2", "source", "reader")(subject, full)
    return [*found, replace(found[1], preset="ties"), *_beyond_candidates(subject)]


def blocking(subject: Subject, full: bool) -> Cases:
    return [*publishing(subject, full), *_beyond_candidates(subject)]


def _beyond_candidates(subject: Subject) -> Cases:
    """The candidate source, with twice as many visible blocks as it may publish."""
    config = subject.config(8)
    visible = 2 * config.candidate_topk_blocks * config.candidate_block_size
    return [_lean(subject, ((visible, 2),), layer="source")]


def layers(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    if full:
        return _on_layers(*ROLES)(subject, full)
    return [_base(subject, ((long, 1), (2, 1)), layer=layer) for layer in ("source2", "consumer")]


def of_two_bases(subject: Subject, full: bool) -> Cases:
    """Far enough on for the bases to differ."""
    layers = ("source2", "source") if full else ("source2",)
    return [_lean(subject, ((300, 3),), layer=layer) for layer in layers]


def attending(subject: Subject, full: bool) -> Cases:
    found = _on_layers("source2", "source")(subject, full)
    return found if not full else [*found, *(replace(case, dtype="float32") for case in found[:2])]


def projecting(subject: Subject, full: bool) -> Cases:
    return _on_layers("source2", "source")(subject, full)


def drafting(subject: Subject, full: bool) -> Cases:
    window, _ = _lengths(subject)
    return [_lean(subject, ((window + 2, 3), (0, 2)), layer="draft")]


def one_by_one(subject: Subject, full: bool) -> Cases:
    case = _lean(subject, ((3, 2),), kv="float32", index="float32", dtype="float32")
    return [replace(case, layer=layer) for layer in (("window", "source2", "source") if full else ("source2",))]


def capturable(subject: Subject, full: bool) -> Cases:
    layers = ("window", "source2", "source", "reader") if full else ("source",)
    return [_lean(subject, ((_lengths(subject)[1], 1),), layer=layer) for layer in layers]


def paged(subject: Subject, full: bool) -> Cases:
    return [_lean(subject, ((5, 2),), layer="source")]


def each_layer(subject: Subject, full: bool) -> Cases:
    return [_lean(subject, ((5, 1),), layer=layer) for layer in (ROLES if full else ("source2",))]


# Attention


def decode(subject: Subject, full: bool) -> Cases:
    window, long = _lengths(subject)
    requests = ((0, 1), (window - 1, 1), (window, 1), (long, 1))
    return [_lean(subject, requests)]


def prefill(subject: Subject, full: bool) -> Cases:
    window, long = _lengths(subject)
    found = [_lean(subject, ((1, window + 1),))]
    longer = [_lean(subject, ((0, window + 2),)), _lean(subject, ((long, 2 * window),))]
    return [*found, *longer] if full else found


def mixed(subject: Subject, full: bool) -> Cases:
    window, long = _lengths(subject)
    return [_lean(subject, ((long, 1), (0, 3), (window, 1)), padding=1)]


def multi_token(subject: Subject, full: bool) -> Cases:
    window, long = _lengths(subject)
    return [_lean(subject, ((long, 2), (window - 1, 2)))]


def nothing_seen(subject: Subject, full: bool) -> Cases:
    layers = ("window", "consumer")
    return [_lean(subject, ((2, 1), (5, 1)), padding=1, first_seen=1 << 20, layer=layer) for layer in layers]


def replayed(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    return [_lean(subject, ((long, 2), (2, 1)), first_seen=long - 1)]


def head_counts(subject: Subject, full: bool) -> Cases:
    """One, few, and those of the release; in full every kind of padding. An interpreter takes seconds for each head."""
    wanted: tuple[int, ...] = (1, 3) if subject.interpreted else (1, 3, 8, 16)
    if subject.device.type == "cuda":
        wanted = (*wanted, 64, 128)
    if full:
        wanted = (1, 3, 5, 8, 16, 24, 32, 64, 100, 128)
    _, long = _lengths(subject)
    return [_base(subject, ((long, 1),), heads=heads, sinks="mixed") for heads in wanted]


def kv_dtypes(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    return [_lean(subject, ((long, 1),), kv=kv, preset="extremes") for kv in subject.kv_cache_dtypes]


def layouts(subject: Subject, full: bool) -> Cases:
    """In quick form the default format; in full all."""
    _, long = _lengths(subject)
    kinds: Iterable[str] = subject.kv_cache_dtypes if full else ("auto",)
    return [_lean(subject, ((long, 1),), kv=kv, layout=name) for kv in kinds for name in VARIANTS if name != "own"]


def sinks(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    return [_base(subject, ((long, 1),), sinks="mixed", layer=layer) for layer in ("window", "consumer")]


def in_reach(subject: Subject, full: bool) -> Cases:
    return [_lean(subject, ((_lengths(subject)[1], 1),))]


def hard_rows(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    found = [
        _lean(subject, ((long, 1),), preset="outliers"),
        _lean(subject, ((long, 1),), preset="extremes", layer="indexer2"),
    ]
    return [replace(case, preset=preset) for case in found for preset in PRESETS] if full else found


def hostile(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    found = [_lean(subject, ((long, 1), (2, 1)))]
    return found + [replace(found[0], kv=kv) for kv in subject.kv_cache_dtypes] if full else found


def padded(subject: Subject, full: bool) -> Cases:
    _, long = _lengths(subject)
    return [_lean(subject, ((long, 1), (2, 1)), padding=2)]


def far(subject: Subject, full: bool) -> Cases:
    return [_lean(subject, ((_lengths(subject)[1], 1),), layout="own-pages", layer="indexer2")]
