"""FlashMLA, called directly, as the peer of `dsv41 bench attention`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv41.errors import BackendError
from dsv41.hal import registry
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.builtin import FLASHMLA
from dsv41.hal.layout import PagedCache
from dsv41.hal.records import Dialect, v4_584

if TYPE_CHECKING:
    from dsv41.bench import Work
    from dsv41.bench_rows import Rows

LIBRARY = "flash_mla"
DISTRIBUTION = "tokenspeed-flashmla"
_HEADS = 64
"""The head count that it is instantiated for, besides 128; fewer are padded, before the call."""


class FlashMLA:
    """Its sparse decode kernel, which reads the 584-byte records in place, in decode and in prefill; and its prefill
    kernel, over rows that are gathered in bf16 first."""

    def __init__(self, backend: AttentionBackend) -> None:
        """Raises BackendError where it is not installed, or cannot read the records of `backend`."""
        layouts = backend.layouts
        if {layouts.window.record, layouts.compressed.record} != {v4_584(Dialect.OCP)}:
            raise BackendError(
                f"flashmla cannot read {layouts.compressed.record.name}: expected the 584-byte record, which it reads "
                "on every GPU that it runs on; use --record fp8_ds_mla_v4"
            )
        try:
            # The one library that the model's room knows, and only because a user names it as the peer.
            self.library: Any = import_module(LIBRARY)
            self.label = f"flashmla {version(DISTRIBUTION)}"
        except PackageNotFoundError:
            self.label = "flashmla"
        except Exception as error:
            raise BackendError(
                f"flash_mla does not import ({error}): expected a build that fits torch {torch.__version__}; "
                f"`pip install {DISTRIBUTION}`"
            ) from None

    def call(self, work: Work, rows: Rows) -> Callable[[], Tensor]:
        spec = work.layer.spec
        assert work.caches.compressed is not None
        arguments = {
            "q": self._padded(work)[:, None],
            "k_cache": _record_view(work.caches.window),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": spec.head_dim,
            "tile_scheduler_metadata": self.library.get_mla_metadata()[0],
            "softmax_scale": spec.scale,
            "is_fp8_kvcache": True,
            "indices": rows.window.int()[:, None],
            "attn_sink": self._sink(work),
            "extra_k_cache": _record_view(work.caches.compressed),
            "extra_indices_in_kvcache": rows.compressed.int()[:, None],
        }

        def run() -> Tensor:
            out: Tensor = self.library.flash_mla_with_kvcache(**arguments)[0]
            return out[:, 0, : spec.num_heads]

        return run

    def gathered(self, work: Work, rows: Rows, *, before: bool = False) -> Callable[[], Tensor] | None:
        """Its prefill kernel, over the rows of all pages in which a row of any token lies, in one bf16 tensor.

        Each call allocates that tensor and gathers into it, by the kernel with which the backend does; or it was made
        `before`, and the call is the prefill kernel alone. Made before in any case, so never timed: the padded queries
        and sink, and the tables, which are the pages and where each token's rows lie among the gathered.
        """
        spec, caches = work.layer.spec, work.caches
        assert caches.compressed is not None
        # The model's room knows no backend but by the registry.
        backend: Any = registry.load(FLASHMLA)
        parts = [(caches.window, rows.window), (caches.compressed, rows.compressed)]
        found = [(slots // cache.layout.page_size).unique(return_inverse=True) for cache, slots in parts]
        device = work.q.device
        # To the backend each page is a request of one page: its first row, its rows, and where they go.
        spans = torch.zeros(max(len(pages) for pages, _ in found), 2, 3, dtype=torch.int64, device=device)
        sources, places, count = [], [], 0
        for kind, ((cache, slots), (pages, page_of)) in enumerate(zip(parts, found, strict=True)):
            size = cache.layout.page_size
            starts = count + size * torch.arange(len(pages), device=device)
            spans[: len(pages), kind, 1] = size
            spans[: len(pages), kind, 2] = starts
            sources.append((cache, pages.int()[:, None]))
            places.append(starts[page_of] + slots % size)
            count += size * len(pages)
        longest = tuple(cache.layout.page_size for cache, _ in parts)
        indices = torch.cat(places, dim=1).int()[:, None]
        q, sink = self._padded(work), self._sink(work)

        def gather() -> Tensor:
            kv = torch.empty(count, 1, spec.head_dim, dtype=torch.bfloat16, device=device)
            backend.gather(sources, spans, longest, kv)
            return kv

        kept = gather() if before else None

        def run() -> Tensor:
            kv = gather() if kept is None else kept
            found = self.library.flash_mla_sparse_fwd(q=q, kv=kv, indices=indices, sm_scale=spec.scale, attn_sink=sink)
            out: Tensor = found[0]
            return out[:, : spec.num_heads]

        return run

    def _padded(self, work: Work) -> Tensor:
        return pad(work.q, (0, 0, 0, -work.q.shape[1] % _HEADS))

    def _sink(self, work: Work) -> Tensor:
        sink = work.layer.weights.attn_sink
        return pad(sink, (0, -len(sink) % _HEADS), value=-torch.inf)


def _record_view(cache: PagedCache) -> Tensor:
    """uint8 `[pages, page_size, 1, 584]`, as FlashMLA counts bytes: element [p, t] is no token's record."""
    size, width = cache.layout.page_size, cache.layout.record.bytes
    return cache.data.as_strided((cache.num_pages, size, 1, width), (cache.data.stride(0), width, width, 1))
