"""Who has which slot, and what the host knows of them, as arrays: no loop over hundreds."""

from __future__ import annotations

from collections.abc import Sequence as Many
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dspark_jax.decode.setup import needs_of
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
        records: ``[3, S, N]`` window, accepted drafts and commits of each step.
        expected: ``[S]`` accepted drafts expected of all windows, summed survivals; NaN without.
        decoding: ``[S]`` whether they decode.
        needs: ``[S, 3]`` what a step must be able to do for them (`decode.setup.Needs`).
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
        self.records = np.zeros((3, slots, longest), np.int16)
        self.expected = np.full(slots, np.nan)
        self.decoding, self.watched = np.zeros((2, slots), bool)
        self.needs = np.zeros((slots, 3), np.int64)

    def seat(self, sequence: Sequence, slot: int) -> None:
        """The sequence takes a free slot."""
        self.sequences[slot] = sequence
        self.request[slot] = sequence.arrival
        self.texts[slot, : sequence.prompt_rows] = sequence.job.prompt_ids
        self.rows[slot], self.most[slot] = sequence.rows, sequence.most
        for counts in (self.in_flight, self.pages, self.remembered, self.steps):
            counts[slot] = 0
        self.expected[slot], self.decoding[slot] = np.nan, False
        params, stream = sequence.job.params, sequence.job.stream
        self.needs[slot] = needs_of([params])
        shown = stream is not None or params.logprobs is not None
        self.watched[slot] = bool(params.stop) or shown
        sequence.roster, sequence.slot = self, slot

    def free(self, sequence: Sequence) -> None:
        """The sequence gives up its slot, and with it its text."""
        self.sequences[sequence.slot] = None
        self.request[sequence.slot] = -1
        sequence.roster, sequence.slot = None, -1

    def order(self) -> Int[np.ndarray, "n"]:
        """Slots that decode, the oldest request first."""
        (slots,) = self.decoding.nonzero()
        return slots[self.request[slots].argsort()]

    def room(self, slots: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Tokens that they may still emit, of what the host knows."""
        return self.most[slots] - self.rows[slots]

    def own(self, slot: int, pages: list[int]) -> None:
        """The slot's pages are these, of which nobody else knows."""
        self.table[slot, : len(pages)] = pages
        self.table[slot, len(pages) :] = -1
        self.pages[slot], self.remembered[slot] = len(pages), 0

    def give(
        self, slots: Int[np.ndarray, "n"], counts: Int[np.ndarray, "n"], pages: list[int]
    ) -> None:
        """``counts`` more pages for each of ``slots``, of ``pages`` in order."""
        first = counts.cumsum() - counts
        column = (self.pages[slots] - first).repeat(counts) + np.arange(len(pages))
        self.table[slots.repeat(counts), column] = pages
        self.pages[slots] += counts

    def extend(
        self,
        slots: Int[np.ndarray, "N"],
        lanes: Int[np.ndarray, "N"],
        tokens: Int[np.ndarray, "n L W"],
        window: Int[np.ndarray, "n L"],
        accepted: Int[np.ndarray, "n L"],
        count: Int[np.ndarray, "n L"],
    ) -> None:
        """Take over what n steps did to the requests in ``slots``, which had these ``lanes``."""
        slot, theirs = np.zeros((2, count.shape[1]), np.int64)
        slot[lanes], theirs[lanes] = slots, 1
        count = count * theirs
        # a lane joins after the step that reads its prompt, and leaves where it ends
        taken = count > 0
        begin = slot * self.texts.shape[1]
        step = (begin + self.steps[slot] + taken.cumsum(axis=0) - 1)[taken]
        for record, values in zip(self.records, (window, accepted, count), strict=True):
            record.reshape(-1)[step] = values[taken]
        first = begin + self.rows[slot] + 1 + count.cumsum(axis=0) - count
        width = tokens.shape[-1]
        (real,) = (np.arange(width) < count[..., None]).ravel().nonzero()
        place = first.ravel().repeat(count.ravel()) + real % width
        self.texts.reshape(-1)[place] = tokens.reshape(-1)[real]
        self.steps[slots] += taken.sum(axis=0)[lanes]
        self.rows[slots] += count.sum(axis=0)[lanes]

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
