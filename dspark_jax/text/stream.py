"""Incremental detokenising that never shows half a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPLACEMENT = "\ufffd"


class TextStream:
    """Text of a growing list of ids, piece by piece.

    The pieces joined equal the text of all ids at once. Trailing bytes of an unfinished
    character are held back until it is complete or ``flush`` is called.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The ids before the pending ones: some tokenizers drop a leading space without them.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; the new text that is safe to show, perhaps empty."""
        self._pending += ids
        text = self._pending_text()
        safe = text.rstrip(REPLACEMENT)
        piece = safe[len(self._shown) :]
        if safe == text and text:
            self._context, self._pending, self._shown = self._pending, [], ""
        else:
            self._shown = safe
        return piece

    def flush(self) -> str:
        """What is still held back, broken characters as U+FFFD; call it once, at the end."""
        piece = self._pending_text()[len(self._shown) :]
        self._context, self._pending, self._shown = [], [], ""
        return piece

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]
