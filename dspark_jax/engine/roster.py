"""Who has which slot, and what the host knows of them, as arrays: no loop over hundreds."""

from __future__ import annotations

from collections.abc import Sequence as Many
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dspark_jax.engine.sequence import Sequence
from dspark_jax.models.pages import PagePool


class Roster:
    """The requests of an engine's slots. A free slot's values mean nothing.

    Texts take memory as they grow: of arrays of zeros, only what has been written lies in it.

    Args:
        slots: S, requests decoded together.
        pool: says how many pages a request has at most, C, of how many rows.

    Attributes:
        sequences: by slot; None where it is free.
        request: ``[S]`` arrival of each; -1 where free.
        texts: ``[S, N]`` token ids of prompt and answer.
        rows: ``[S]`` known rows: all of the text but its last token, the anchor of the next step.
        most: ``[S]`` most rows.
        in_flight: ``[S]`` steps dispatched and not read yet.
        table: ``[S, C]`` pages of the rows, in order; -1 behind the last.
        pages: ``[S]`` how many.
        remembered: ``[S]`` how many of them the store has been told of.
        steps: ``[S]`` steps so far.
        records: ``[S, N, 3]`` window, accepted drafts and commits of each step.
        expected: ``[S]`` accepted drafts expected of all windows, summed survivals; NaN without.
        watched: ``[S]`` whether every dispatch is looked at: stop strings, streams, logprobs.
    """

    def __init__(self, slots: int, pool: PagePool) -> None:
        longest = pool.columns * pool.size
        self.sequences: list[Sequence | None] = [None] * slots
        self.request = np.full(slots, -1)
        self.texts = np.zeros((slots, longest), np.int32)
        self.rows, self.most, self.in_flight, self.pages, self.remembered, self.steps = np.zeros(
            (6, slots), np.int64
        )
        self.table = np.full((slots, pool.columns), -1, np.int32)
        self.records = np.zeros((slots, longest, 3), np.int16)
        self.expected = np.full(slots, np.nan)
        self.watched = np.zeros(slots, bool)

    def seat(self, sequence: Sequence, slot: int) -> None:
        """The sequence takes a free slot."""
        self.sequences[slot] = sequence
        self.request[slot] = sequence.arrival
        self.texts[slot, : sequence.prompt_rows] = sequence.job.prompt_ids
        self.rows[slot], self.most[slot] = sequence.rows, sequence.most
        for counts in (self.in_flight, self.pages, self.remembered, self.steps):
            counts[slot] = 0
        self.expected[slot] = np.nan
        job = sequence.job
        watched = job.params.stop or job.stream is not None or job.params.logprobs is not None
        self.watched[slot] = bool(watched)
        sequence.roster, sequence.slot = self, slot

    def free(self, sequence: Sequence) -> None:
        """The sequence gives up its slot, and with it its text."""
        self.sequences[sequence.slot] = None
        self.request[sequence.slot] = -1
        sequence.roster, sequence.slot = None, -1

    def room(self, slots: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Tokens that they may still emit, of what the host knows."""
        return self.most[slots] - self.rows[slots]

    def give(self, slots: Int[np.ndarray, "n"], counts: Any, pages: Many[int]) -> None:
        """``counts`` more pages for each of ``slots``, of ``pages`` in order."""
        counts = np.broadcast_to(counts, slots.shape)
        self.table[_places(slots, self.pages[slots], counts)] = pages
        self.pages[slots] += counts

    def take_pages(self, slot: int) -> list[int]:
        """The slot's pages, which it has no longer."""
        pages = self.table[slot, : self.pages[slot]].tolist()
        self.table[slot] = -1
        self.pages[slot] = self.remembered[slot] = 0
        return pages

    def extend(
        self,
        slots: Int[np.ndarray, "L"],
        tokens: Int[np.ndarray, "n L W"],
        window: Int[np.ndarray, "n L"],
        accepted: Int[np.ndarray, "n L"],
        count: Int[np.ndarray, "n L"],
    ) -> None:
        """Take over what n steps did to the requests in ``slots``, in this order."""
        count = count.T
        # a lane joins after the step that reads its prompt, and leaves where it ends
        taken = count > 0
        steps, emitted = taken.sum(axis=1), count.sum(axis=1)
        record = np.stack([window.T[taken], accepted.T[taken], count[taken]], axis=-1)
        self.records[_places(slots, self.steps[slots], steps)] = record
        real = np.arange(tokens.shape[-1]) < count[..., None]
        self.texts[_places(slots, self.rows[slots] + 1, emitted)] = np.swapaxes(tokens, 0, 1)[real]
        self.steps[slots] += steps
        self.rows[slots] += emitted

    def expect(self, slots: Int[np.ndarray, "L"], accepted: Any) -> None:
        """So many more drafts were expected to be accepted."""
        self.expected[slots] = np.nan_to_num(self.expected[slots]) + accepted

    def here(
        self, slots: Int[np.ndarray, "L"], requests: Int[np.ndarray, "L"]
    ) -> Bool[np.ndarray, "L"]:
        """Whether these requests have not left these slots."""
        return self.request[slots] == requests


def slots_of(sequences: Many[Sequence]) -> Int[np.ndarray, "n"]:
    """Their slots."""
    return np.fromiter(map(attrgetter("slot"), sequences), np.intp, len(sequences))


def _places(slots: np.ndarray, begin: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Row and column of ``counts`` places in a row from ``begin`` on, one slot after another."""
    first = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.repeat(begin - first, counts) + np.arange(counts.sum())
