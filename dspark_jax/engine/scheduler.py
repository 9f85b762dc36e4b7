"""Who runs in the next step: joins, pieces of prompts, room for rows, preemption. Host only."""

from __future__ import annotations

import bisect
import dataclasses
from operator import attrgetter

from dspark_jax.engine.page_store import Key, PageStore
from dspark_jax.engine.sequence import Sequence, Stage
from dspark_jax.models.pages import PagePool


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
    """

    starting: list[Sequence]
    decoding: list[Sequence]
    pieces: list[Piece]
    late: list[Sequence]
    steps: int

    @property
    def sequences(self) -> list[Sequence]:
        """Everyone in it, once each."""
        prompts = dict.fromkeys(piece.sequence for piece in self.pieces)
        return [*self.decoding, *self.late, *(one for one in prompts if one not in self.late)]


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
        steps: steps of a dispatch beside the one that reads prompts, as long as there are pages.
        prefix_reuse: whether full pages are kept for later requests.

    Attributes:
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
        steps: int,
        prefix_reuse: bool,
    ) -> None:
        self.store = PageStore(pool.count)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
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
        bisect.insort(self.waiting, sequence, key=attrgetter("arrival"))

    def plan(self) -> Plan | None:
        """The next dispatch; None when there is nothing to run before something is read."""
        if not self._make_room():
            self._join()
        starting = [
            s for s in self.running if s.stage is Stage.PREFILLING and s.prefilled == s.rows
        ]
        for sequence in starting:
            sequence.stage = Stage.DECODING
        # A step emits a token at least: whoever has as many in flight as room will have ended.
        decoding = [s for s in self.running if s.stage is Stage.DECODING and s.in_flight < s.room]
        pieces = self._next_pieces()
        if not decoding and not pieces:
            return None
        reading = [s for s in self.running if s.stage is Stage.PREFILLING]
        late = [s for s in reading if s.prefilled == s.rows]
        steps = self._steps + bool(pieces)
        nobody = not decoding and not late
        if (
            nobody
            or self._unread(reading) >= self._pieces
            or not self._grow([*decoding, *late], steps)
        ):
            late, steps = [], 1
        for sequence in late:
            sequence.stage = Stage.DECODING
        for sequence in (*decoding, *late):
            sequence.in_flight += steps
        return Plan(starting, decoding, pieces, late, steps)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives up slot, pages and place in the queue."""
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        elif sequence.stage is not Stage.DONE:
            self.running.remove(sequence)
            self.store.release(sequence.pages)
            self._free_slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], -1
        sequence.prefilled = sequence.remembered = 0

    def remember(self, sequence: Sequence, rows: int | None = None) -> None:
        """The first ``rows`` rows, or all, are or are about to be in its pages for good."""
        if not self._reuse or not sequence.pages:
            return
        full = (sequence.rows if rows is None else rows) // self._page_size
        if full <= sequence.remembered:
            return
        keys = sequence.page_keys(self._page_size)
        for column in range(sequence.remembered, full):
            self.store.remember(sequence.pages[column], keys[column])
        sequence.remembered = full

    def _unread(self, reading: list[Sequence]) -> int:
        """Pieces that the prompts of these still come in."""
        return sum(-(-(s.rows - s.prefilled) // self._prompt_width) for s in reading)

    def _make_room(self) -> bool:
        """Pages for one more step of everyone who decodes, oldest first; whether one had to go."""
        if self._grow([s for s in self.running if s.stage is Stage.DECODING], 1):
            return False
        preempted = False
        for sequence in list(self.running):
            if sequence.stage is not Stage.DECODING:
                continue
            while sequence.slot >= 0 and not self._grow([sequence], 1):
                self._preempt(self.running[-1])
                preempted = True
        return preempted

    def _grow(self, sequences: list[Sequence], steps: int) -> bool:
        """Give all of them pages for ``steps`` more steps, or none of them any."""
        missing = [self._missing(sequence, steps) for sequence in sequences]
        if sum(missing) > self.store.free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            if count:
                sequence.pages += self.store.take(count)
        return True

    def _missing(self, sequence: Sequence, steps: int) -> int:
        rows = sequence.most_rows(steps, self._width) - len(sequence.pages) * self._page_size
        return -(-rows // self._page_size) if rows > 0 else 0

    def _preempt(self, sequence: Sequence) -> None:
        self.leave(sequence)
        sequence.stage = Stage.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _join(self) -> None:
        """Let the queue in while slots and pages last, in order.

        A request whose next page an older one is about to fill waits for it, and those behind it
        too: prompts are read oldest first, so there is little that they lose by it.
        """
        if not self.waiting:
            return
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            if sequence.in_flight:
                return  # its newest tokens are not read yet
            keys = sequence.page_keys(self._page_size) if self._reuse else []
            shared = self.store.known(keys)
            if self._coming(keys, len(shared)):
                return
            missing = self._missing(sequence, 1) - len(shared)
            left = self.store.free - missing - self.store.unused(shared)
            if left < len(self.running) and left < self._growing():
                return
            self.store.share(shared)
            sequence.pages = shared + self.store.take(missing)
            sequence.remembered = len(shared)
            sequence.prefilled = len(shared) * self._page_size
            sequence.reused_rows += sequence.prefilled
            self.sought_rows += sequence.rows
            self.reused_rows += sequence.prefilled
            sequence.slot = self._free_slots.pop()
            sequence.stage = Stage.PREFILLING
            self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=attrgetter("arrival"))

    def _growing(self) -> int:
        """Pages for those that will grow, or they would throw a newcomer out again: one each."""
        return sum(self._missing(other, self._steps + 2) > 0 for other in self.running)

    def _coming(self, keys: list[Key], page: int) -> bool:
        """Whether a prompt that is being read will fill the page of this index and key."""
        return page < len(keys) and any(
            page < len(other.keys) and other.keys[page] == keys[page]
            for other in self.running
            if other.stage is Stage.PREFILLING and other.prefilled < other.rows
        )

    def _next_pieces(self) -> list[Piece]:
        """As many rows of prompts as a step takes, of the oldest first."""
        pieces: list[Piece] = []
        for sequence in self.running:
            if sequence.stage is not Stage.PREFILLING:
                continue
            while sequence.prefilled < sequence.rows and len(pieces) < self._pieces:
                start = sequence.prefilled
                end = min(start + self._prompt_width, sequence.rows)
                pieces.append(Piece(sequence, start, sequence.text(start, end)))
                sequence.prefilled = end
                # What runs after this dispatch finds the rows written.
                self.remember(sequence, end)
        return pieces
