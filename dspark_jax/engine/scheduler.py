"""Who runs in the next step: joins, pieces of prompts, room for rows, preemption. Host only."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from dspark_jax.engine.page_store import Key, PageStore
from dspark_jax.engine.roster import Roster, slots_of
from dspark_jax.engine.sequence import Sequence, Stage
from dspark_jax.models.pages import PagePool

_ARRIVAL = attrgetter("arrival")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows ``start..start+len(tokens)-1`` of a prompt, to be prefilled."""

    sequence: Sequence
    start: int
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One dispatch.

    Attributes:
        starting: sequences whose prompt is complete, to be admitted to decoding first.
        decoding: sequences that decode, the starting ones included.
        pieces: of prompts, which ride along in a step of their own before the others.
        late: sequences whose prompt the pieces complete; they decode in the steps after that one.
        steps: steps to take, that with the pieces included; a single one where pages are short or
            prompts fill the next one too.
        slots: of those that decode, of the late ones, and of the others whose prompts are read.
    """

    starting: list[Sequence]
    decoding: list[Sequence]
    pieces: list[Piece]
    late: list[Sequence]
    steps: int
    slots: np.ndarray


class Scheduler:
    """Decides from what the host knows; nothing here waits for the device.

    Older requests go first. When pages run out the newest request loses its own and waits to be
    computed again; the oldest can always finish, because the pool holds any one request.
    Prompts are read in the first step of a dispatch; while they fill one after the other, it is the
    only one.

    Args:
        pool: the pages.
        slots: requests decoded together.
        width: rows of a full window.
        pieces: pieces of prompts in one step.
        prompt_width: rows of a piece.
        steps: of a dispatch in which so many take part, beside the one that reads prompts, as long
            as there are pages.
        prefix_reuse: whether full pages are kept for later requests.

    Attributes:
        roster: who has which slot.
        waiting, running: by arrival.
        reading: those that run whose prompts have not been read yet.
        preemptions: how often a request lost its pages.
        sought_rows: rows of joining requests, looked for in known pages.
        reused_rows: rows that were found there instead of computed.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        slots: int,
        width: int,
        pieces: int,
        prompt_width: int,
        steps: Callable[[int], int],
        prefix_reuse: bool,
    ) -> None:
        self.store = PageStore(pool.count)
        self.roster = Roster(slots, pool)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reading: list[Sequence] = []
        self.preemptions = 0
        self.sought_rows = 0
        self.reused_rows = 0
        self._page_size = pool.size
        self._free_slots = list(reversed(range(slots)))
        self._width = width
        self._pieces = pieces
        self._prompt_width = prompt_width
        self._steps = steps
        self._reuse = prefix_reuse

    def add(self, sequence: Sequence) -> None:
        """A sequence that wants to run."""
        bisect.insort(self.waiting, sequence, key=_ARRIVAL)

    def plan(self) -> Plan | None:
        """The next dispatch; None when there is nothing to run before something is read."""
        if not self._make_room():
            self._join()
        starting = [s for s in self.reading if s.prefilled == s.rows]
        self._decode(starting)
        # A step emits a token at least: whoever has as many in flight as room will have ended.
        slots = self.roster.order()
        slots = slots[self.roster.in_flight[slots] < self.roster.room(slots)]
        pieces = self._next_pieces()
        if not len(slots) and not pieces:
            return None
        late = [s for s in self.reading if s.prefilled == s.rows]
        readers = dict.fromkeys(piece.sequence for piece in pieces)
        steps = self._steps(len(slots) + len(readers)) + bool(pieces)
        nobody = not len(slots) and not late
        everyone = np.concatenate([slots, slots_of(late)])
        if nobody or self._unread() >= self._pieces or not self._grow(everyone, steps):
            late, everyone, steps = [], slots, 1
        self._decode(late)
        self.roster.in_flight[everyone] += steps
        decoding = [self.roster.sequences[slot] for slot in slots.tolist()]
        reading = [one for one in readers if one.stage is Stage.PREFILLING]
        everyone = np.concatenate([everyone, slots_of(reading)])
        return Plan(starting, decoding, pieces, late, steps, everyone)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives up slot, pages and place in the queue."""
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        else:
            self._stop(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            self.roster.free(sequence)

    def remember(self, slots: np.ndarray) -> None:
        """Full pages of these are known from now on."""
        full = self.roster.rows[slots] // self._page_size > self.roster.remembered[slots]
        for slot in slots[full & (self.roster.pages[slots] > 0)].tolist():
            sequence = self.roster.sequences[slot]
            self._remember(sequence, sequence.rows)

    def _remember(self, sequence: Sequence, rows: int) -> None:
        """The first ``rows`` rows are or are about to be in its pages for good."""
        if not self._reuse:
            return
        roster, slot = self.roster, sequence.slot
        known, full = int(roster.remembered[slot]), rows // self._page_size
        if known < full:
            keys = sequence.page_keys(self._page_size)
            pages = roster.table[slot, known:full].tolist()
            for page, key in zip(pages, keys[known:full], strict=True):
                self.store.remember(page, key)
            roster.remembered[slot] = full

    def _unread(self) -> int:
        """Pieces that the prompts of those that read still come in."""
        return sum(-(-(s.rows - s.prefilled) // self._prompt_width) for s in self.reading)

    def _decode(self, sequences: list[Sequence]) -> None:
        """Their prompts have been read."""
        for sequence in sequences:
            sequence.stage = Stage.DECODING
            self.roster.decoding[sequence.slot] = True
        self.reading = [s for s in self.reading if s.stage is Stage.PREFILLING]

    def _make_room(self) -> bool:
        """Pages for one more step of everyone who decodes, oldest first; whether one had to go."""
        slots = self.roster.order()
        if self._grow(slots, 1):
            return False
        for slot in slots[self._missing(slots, 1) > 0]:
            alone = np.array([slot])
            while self.roster.decoding[slot] and not self._grow(alone, 1):
                self._preempt(self.running[-1])
        return True

    def _grow(self, slots: np.ndarray, steps: int) -> bool:
        """Give all of them pages for ``steps`` more steps, or none of them any."""
        missing = self._missing(slots, steps)
        total = int(missing.sum())
        if total > self.store.free:
            return False
        if total:
            self.roster.give(slots, missing, self.store.take(total))
        return True

    def _missing(self, slots: np.ndarray, steps: int) -> np.ndarray:
        """Pages that each still needs for ``steps`` more steps."""
        roster = self.roster
        rows = roster.rows[slots] + (roster.in_flight[slots] + steps) * self._width
        wanted = -(-np.minimum(rows, roster.most[slots]) // self._page_size)
        return np.maximum(wanted - roster.pages[slots], 0)

    def _stop(self, sequence: Sequence) -> None:
        """It runs no longer, and its pages are free."""
        if sequence.stage is Stage.PREFILLING:
            self.reading.remove(sequence)
        self.roster.decoding[sequence.slot] = False
        del self.running[bisect.bisect_left(self.running, sequence.arrival, key=_ARRIVAL)]
        self.store.release(sequence.pages)
        self.roster.pages[sequence.slot] = 0

    def _preempt(self, sequence: Sequence) -> None:
        """It keeps its slot: nobody newer joins before it does."""
        self._stop(sequence)
        sequence.stage = Stage.WAITING
        sequence.prefilled = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _join(self) -> None:
        """Let the queue in while slots and pages last, in order.

        A request whose next page an older one is about to fill waits for it, and those behind it
        too: prompts are read oldest first, so there is little that they lose by it.
        """
        while self.waiting and (self.waiting[0].slot >= 0 or self._free_slots):
            sequence = self.waiting[0]
            if sequence.in_flight:
                return  # its newest tokens are not read yet
            keys = sequence.page_keys(self._page_size) if self._reuse else []
            shared = self.store.known(keys)
            if self._coming(keys, len(shared)):
                return
            rows = min(sequence.rows + self._width, sequence.most)
            missing = -(-rows // self._page_size) - len(shared)
            left = self.store.free - missing - self.store.unused(shared)
            if left < len(self.running) and left < self._growing():
                return
            if sequence.slot < 0:
                self.roster.seat(sequence, self._free_slots.pop())
            self.store.share(shared)
            self.roster.own(sequence.slot, shared + self.store.take(missing))
            self.roster.remembered[sequence.slot] = len(shared)
            sequence.prefilled = len(shared) * self._page_size
            sequence.reused_rows += sequence.prefilled
            self.sought_rows += sequence.rows
            self.reused_rows += sequence.prefilled
            sequence.stage = Stage.PREFILLING
            self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=_ARRIVAL)
            bisect.insort(self.reading, sequence, key=_ARRIVAL)

    def _growing(self) -> int:
        """Pages for those that will grow, or they would throw a newcomer out again: one each."""
        steps = self._steps(len(self.running)) + 2
        return int((self._missing(slots_of(self.running), steps) > 0).sum())

    def _coming(self, keys: list[Key], page: int) -> bool:
        """Whether a prompt that is being read will fill the page of this index and key."""
        return page < len(keys) and any(
            page < len(other.keys) and other.keys[page] == keys[page]
            for other in self.reading
            if other.prefilled < other.rows
        )

    def _next_pieces(self) -> list[Piece]:
        """As many rows of prompts as a step takes, of the oldest first."""
        pieces: list[Piece] = []
        for sequence in self.reading:
            rows = sequence.rows
            while sequence.prefilled < rows and len(pieces) < self._pieces:
                start = sequence.prefilled
                end = min(start + self._prompt_width, rows)
                pieces.append(Piece(sequence, start, sequence.text(start, end)))
                sequence.prefilled = end
                # What runs after this dispatch finds the rows written.
                self._remember(sequence, end)
        return pieces
