"""Who holds which page: pools with shared pages, and the page table of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv41.errors import PoolExhausted
from dsv41.hal.layout import PagedCache


class PagePool:
    """The pages of one pool. A page may have several holders; it is free when the last gives it back."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.name, self.num_pages = name, num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def check(self, count: int, who: str = "the step") -> None:
        """Raise PoolExhausted unless `count` pages are free."""
        if count > len(self._free):
            raise PoolExhausted(
                f"{who} needs {count} {self.name} pages: expected at most {len(self._free)}, the free ones of "
                f"{self.num_pages}; free a request and try again, or make the session with more max_tokens; nothing "
                "has been changed"
            )

    def take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def give_back(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)


@dataclass
class _Change:
    """One entry of a page table that is about to change: a page taken, and the page that it is a copy of."""

    table: list[int]
    place: int
    old: int
    new: int


@dataclass
class Writing:
    """Pages made ready for a step. Exactly one of `commit` and `undo` ends it."""

    pools: Mapping[int, PagePool]
    changes: dict[int, list[_Change]]

    def commit(self) -> None:
        """The step was taken: give back the shared pages that copies stand for."""
        for pool, changes in self.changes.items():
            for change in changes:
                if change.old >= 0:
                    self.pools[pool].give_back(change.old)

    def undo(self) -> None:
        """The step was not taken: every table is as it was."""
        for pool, changes in self.changes.items():
            for change in reversed(changes):
                self.pools[pool].give_back(change.new)
                change.table[change.place] = change.old
                while change.table and change.table[-1] < 0:
                    change.table.pop()


@dataclass
class PageTables:
    """The page tables of one request, by pool. Entry i is the page of rows `i * page_size` on; -1 = not held."""

    tables: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Pages:
    """Every pool with its page size and the caches whose pages it deals."""

    pools: dict[int, PagePool]
    page_size: dict[int, int]
    caches: dict[int, list[PagedCache]]

    def new_tables(self) -> PageTables:
        return PageTables({pool: [] for pool in self.pools})

    def make_writable(self, rows: Iterable[tuple[PageTables, int, int, int]], who: str = "the step") -> Writing:
        """Give each request pages of its own for the rows `first : last` of a pool, or change nothing.

        `rows` are (tables, pool, first, last). Missing pages are taken; shared ones are copied, since someone else
        still reads them. Raises PoolExhausted, naming `who` wants them.
        """
        wanted: dict[int, list[tuple[list[int], int]]] = {pool: [] for pool in self.pools}
        for tables, pool, first, last in rows:
            size, table = self.page_size[pool], tables.tables[pool]
            for place in range(first // size, -(-last // size)) if last > first else ():
                page = table[place] if place < len(table) else -1
                if page < 0 or self.pools[pool].is_shared(page):
                    wanted[pool].append((table, place))
        for pool, places in wanted.items():
            self.pools[pool].check(len(places), who)
        changes: dict[int, list[_Change]] = {pool: [] for pool in self.pools}
        for pool, places in wanted.items():
            for table, place in places:
                table.extend([-1] * (place + 1 - len(table)))
                change = _Change(table, place, table[place], self.pools[pool].take())
                table[place] = change.new
                changes[pool].append(change)
            self._copy([c for c in changes[pool] if c.old >= 0], pool)
        return Writing(self.pools, changes)

    def _copy(self, changes: Sequence[_Change], pool: int) -> None:
        if not changes:
            return
        old, new = ([getattr(change, end) for change in changes] for end in ("old", "new"))
        for cache in self.caches[pool]:
            cache.data[new, : cache.layout.page_bytes] = cache.data[old, : cache.layout.page_bytes]
            if cache.scale_pool is not None:
                cache.scale_pool[new] = cache.scale_pool[old]

    def share(self, tables: PageTables, pool: int, rows: int, first_row: int = 0) -> list[int]:
        """A table over the same pages for the rows `first_row : rows`."""
        size = self.page_size[pool]
        shared = tables.tables[pool][: -(-rows // size)]
        shared[: first_row // size] = [-1] * min(first_row // size, len(shared))
        for page in shared:
            if page >= 0:
                self.pools[pool].share(page)
        return shared

    def keep_rows(self, tables: PageTables, pool: int, first: int, last: int) -> None:
        """Give back the pages that hold none of the rows `first : last`; rows past `last` become unwritten."""
        size, table = self.page_size[pool], tables.tables[pool]
        end = -(-last // size)
        for page in table[end:]:
            if page >= 0:
                self.pools[pool].give_back(page)
        del table[end:]
        for place in range(min(first // size, len(table)) - 1, -1, -1):
            if table[place] < 0:
                break
            self.pools[pool].give_back(table[place])
            table[place] = -1

    def free(self, tables: PageTables) -> None:
        for pool in self.pools:
            self.keep_rows(tables, pool, 0, 0)

    def held(self, tables: PageTables, pool: int) -> int:
        """How many pages of a pool the request holds."""
        return sum(page >= 0 for page in tables.tables[pool])

    @staticmethod
    def as_tensor(tables: Sequence[Sequence[int]]) -> Tensor:
        """int32 `[R, longest]`, filled with -1."""
        width = max((len(row) for row in tables), default=0)
        out = torch.full((len(tables), width), -1, dtype=torch.int32)
        for row, held in zip(out, tables, strict=True):
            row[: len(held)] = torch.tensor(held, dtype=torch.int32)
        return out
