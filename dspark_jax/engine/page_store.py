"""Who owns which page: reference counts, and full pages that wait to be used again.

A full page of committed rows is known by a key that names its tokens and all before them. Any
request whose text begins so may share it. A page that nobody uses any more stays known until its
place is needed; the one unused for longest goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

Key = bytes


def next_key(previous: Key, tokens: Sequence[int]) -> Key:
    """Key of a page of ``tokens`` behind the page, or text start ``b""``, of key ``previous``."""
    return hashlib.blake2b(
        previous + np.asarray(tokens, np.int32).tobytes(), digest_size=16
    ).digest()


class PageStore:
    """The pages of one pool, on the host.

    Args:
        count: pages of the pool.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._blank = deque(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody uses, known or not."""
        return len(self._blank) + len(self._idle)

    @property
    def cached(self) -> int:
        """Free pages that are known and kept for texts that begin the same."""
        return len(self._idle)

    def known(self, keys: Iterable[Key]) -> list[int]:
        """The pages of the longest run of ``keys`` that are known, from the first on."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def unused(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody uses now."""
        return sum(self._users[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of known pages."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for new rows, each with one user.

        Raises:
            ValueError: fewer are free; none has been taken.
        """
        if count > self.free:
            raise ValueError(f"{count} pages are wanted and {self.free} free: make room first")
        taken = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._users[page] = 1
            taken.append(page)
        return taken

    def remember(self, page: int, key: Key) -> None:
        """A page now holds committed rows that ``key`` names, and will not be written again.

        When another page of that key is known already, this one stays private.
        """
        if page not in self._key_of and key not in self._page_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def release(self, pages: Sequence[int]) -> None:
        """Count one user less of each; the tail of a text is forgotten before its head."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._blank.append(page)
