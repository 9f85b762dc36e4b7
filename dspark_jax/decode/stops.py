"""Stop strings on the host: finding them, and showing no text that may become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark_jax.text.stream import TextStream

Decode = Callable[[Sequence[int]], str]


def find_stop(decode: Decode, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that is completed first.

    Returns:
        The number of tokens up to and including the one that completes it, and the text before
        it; None when no stop string occurs.
    """

    def stopped(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(ids)):
        return None
    below, enough = 0, len(ids)
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (below, middle) if stopped(middle) else (middle, enough)
    text = decode(ids[:enough])
    return enough, text[: min(text.find(stop) for stop in stops if stop in text)]


def undecided(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may grow into a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class StopAwareStream:
    """Shows growing text, never past a stop string and never half a character."""

    def __init__(
        self, show: Callable[[str], None], stream: TextStream, stops: Sequence[str]
    ) -> None:
        self._show = show
        self._stream = stream
        self._stops = stops
        self._seen_ids = 0
        self._text = ""
        self._shown = 0

    def update(self, ids: Sequence[int]) -> None:
        """All ids so far, none of which completes a stop string."""
        self._text += self._stream.push(ids[self._seen_ids :])
        self._seen_ids = len(ids)
        self._advance(len(self._text) - undecided(self._text, self._stops))

    def finish(self, text: str) -> None:
        """The final text: show what was held back."""
        self._text = text
        self._advance(len(text))

    def _advance(self, end: int) -> None:
        if end > self._shown:
            piece, self._shown = self._text[self._shown : end], end
            self._show(piece)
