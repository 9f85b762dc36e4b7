"""What each leg of a dispatch drafts and verifies: shapes, and the choice among them. Host only.

A step that chose its own depth and rows would branch on the device, and a branch costs a GPU's
host a round trip. So each leg of a dispatch has one shape, chosen when it is prepared, from
confidences of steps that have been read: the policy "lagged".
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.engine.lanes import Report
from dspark_jax.schedule.cost import CostTables

LEAST_SAVING = 0.05
"""A shape that saves less of a step than this, against the next larger one, is left out."""

DEEPER = 1
"""Compiled depths walked beyond an even share of the rows, so that there are drafts to choose from.

With two, seven drafts for three verified, a step of 256 users took 3.17 ms on an H200, and 2.83
with three drafts for three.
"""

DEAREST_WALK = 0.1
"""Share of a step that these may cost; where drafting is dear, on a CPU, choice is worth less."""


def every_shape(buckets: Sequence[int], batch: int, depths: Sequence[int]) -> tuple[Shape, ...]:
    """One shape for each of ``buckets``, by increasing rows; the first drafts nothing.

    Args:
        buckets: increasing row counts of a step of ``batch`` requests; the last holds full windows.
        depths: increasing depths that a block can be walked to.
    """
    shapes = [Shape(0, batch)]
    for rows in buckets:
        if rows > batch:
            even = bisect.bisect_left(depths, -(-(rows - batch) // batch))
            deeper = even + DEEPER if batch > 1 else even
            shapes.append(Shape(depths[min(deeper, len(depths) - 1)], rows))
    return tuple(shapes)


def paying_shapes(
    shapes: Sequence[Shape], batch: int, depths: Sequence[int], costs: CostTables
) -> tuple[Shape, ...]:
    """Those of ``shapes`` that save time, walked as deep as pays; the first and the last stay.

    Args:
        depths: as in `every_shape`.
    """
    shapes = [_not_too_deep(shape, batch, depths, costs) for shape in shapes]
    seconds = _seconds(tuple(shapes), batch, costs).mean(axis=0)
    kept = [len(shapes) - 1]
    for index in range(len(shapes) - 2, 0, -1):
        if seconds[index] <= (1 - LEAST_SAVING) * seconds[kept[0]]:
            kept.insert(0, index)
    return tuple(shapes[index] for index in (0, *kept))


def _not_too_deep(shape: Shape, batch: int, depths: Sequence[int], costs: CostTables) -> Shape:
    """The shape, shallower where what it walks beyond an even share is dear."""
    even = -(-(shape.rows - batch) // batch)
    walked = tuple(Shape(depth, shape.rows) for depth in depths if even <= depth <= shape.depth)
    if not walked:
        return shape
    seconds = _seconds(walked, batch, costs).mean(axis=0)
    return walked[np.flatnonzero(seconds <= (1 + DEAREST_WALK) * seconds[0])[-1]]


def _seconds(shapes: tuple[Shape, ...], batch: int, costs: CostTables) -> np.ndarray:
    """``[C, n]`` seconds of steps of ``batch`` lanes at each context of the table."""
    depth, rows = _columns(shapes)
    walk = np.asarray(costs.walk)[depth - 1] * (depth > 0)
    return np.asarray(costs.verify)[:, rows] + np.asarray(costs.draft)[:, batch, None] * walk


@functools.cache
def _columns(shapes: tuple[Shape, ...]) -> np.ndarray:
    """``[2, n]`` depths and rows."""
    return np.array([(shape.depth, shape.rows) for shape in shapes]).T


AGING_RATE = 1 / 256
"""Share of the distance to 1 that a confidence covers in a step that did not measure it.

Slower than in `schedule.survival`: what is tried again is tried for a whole dispatch.
"""

UNDRAFTED_AGING_RATE = 1 / 1024
"""The same in a step that drafted nothing: to try drafting again costs more than to walk deeper."""

TYPICAL_RATE = 0.05
"""Weight of a step's mean confidences in those that a new request begins with."""


MOST_REQUESTS = 512
"""Requests whose survivals a choice is made by; of more every second, and so on."""


@dataclasses.dataclass
class _Measured:
    """What steps of one depth measured of the requests in ``slots``, which had these ``lanes``.

    ``taken`` is ``[n, L]``, ``confidence`` ``[G, n, L]`` of the drafts that were walked.
    """

    slots: np.ndarray
    lanes: np.ndarray
    taken: np.ndarray
    confidence: np.ndarray


Whole = Sequence[int] | np.ndarray
"""Whole numbers, one a request."""


class ShapeChoice:
    """Chooses the shape that promises most tokens a second.

    Args:
        slots: requests decoded together.
        step: block size, lag, smoothing and hysteresis are taken from it.
    """

    def __init__(self, slots: int, step: StepConfig) -> None:
        self._known = np.ones((step.depth, slots), np.float32)
        self._typical = np.ones(step.depth, np.float32)
        self._measured = np.zeros(step.depth, np.int64)
        self._room = np.zeros(slots, np.int64)
        self._rows = np.zeros(slots, np.int64)
        self._step = step
        self._held: deque[_Measured] = deque()
        self._last: dict[tuple[Shape, ...], int] = {}
        # tokens a second and request of decoding without prompts
        self._pace = 0.0

    def begin(self, slot: int, room: int, rows: int) -> None:
        """A request begins to decode: it is taken for a typical one until it has been measured.

        The first of all are trusted. A short answer may end before its first dispatch is read.

        Args:
            room: tokens it may still emit.
            rows: its live cache rows.
        """
        self._known[:, slot], self._room[slot], self._rows[slot] = self._typical, room, rows
        for held in self._held:
            held.taken[:, held.lanes[held.slots == slot]] = False

    def learn(
        self,
        slots: Whole,
        lanes: Whole,
        report: Report,
        room: Whole,
        rows: Whole,
    ) -> None:
        """What a dispatch that has been read says of the requests in ``slots``.

        Args:
            lanes: where they decoded in it.
            report: on the host.
            room, rows: as in `begin`, after the dispatch.
        """
        index, lane = np.asarray(slots, int), np.asarray(lanes, int)
        self._room[index], self._rows[index] = room, rows
        decision = report.outcome.decision
        assert decision is not None, "only modes that draft have shapes"
        count = np.asarray(report.outcome.count)
        theirs = np.zeros(count.shape[1], bool)
        theirs[lane] = True
        taken = (count > 0) & theirs
        # a position after the other: what is added up lies side by side
        confidence = np.asarray(decision.confidence).transpose(2, 0, 1)
        begin = 0
        # the legs of a dispatch have shapes of their own
        for depth, steps in itertools.groupby(np.asarray(decision.depth).tolist()):
            end = begin + sum(1 for _ in steps)
            walked = np.ascontiguousarray(confidence[:depth, begin:end])
            self._held.append(_Measured(index, lane, taken[begin:end], walked))
            begin = end
        # The next dispatch to be planned begins two steps later at least: one is in flight.
        newer = sum(len(held.taken) for held in self._held)
        while self._held:
            newer -= len(self._held[0].taken)
            if newer < self._step.lag - 2:
                break
            self._remember(self._held.popleft())

    def _remember(self, measured: _Measured) -> None:
        """As `schedule.survival.remember`, for several steps at once."""
        slots, lanes, taken = measured.slots, measured.lanes, measured.taken
        confidence = np.where(taken, measured.confidence, 0.0)
        depth, steps = len(confidence), int(taken.any(axis=1).sum())
        if steps and depth:
            mean = confidence.reshape(depth, -1).sum(axis=1) / taken.sum()
            # the first steps of all weigh as much as each other, or trust would outlast them
            first = steps / (1.0 + steps + self._measured[:depth])
            weight = np.maximum(1.0 - (1.0 - TYPICAL_RATE) ** steps, first)
            self._typical[:depth] += weight * (mean - self._typical[:depth])
            self._measured[:depth] += steps
        known = self._known.take(slots, axis=1, mode="clip")
        if depth:
            kept, weight = _running(taken, self._step.smoothing)
            known[:depth] *= kept[lanes]
            known[:depth] += (weight * confidence).sum(axis=1).take(lanes, axis=1, mode="clip")
        if depth < len(known):
            aging = AGING_RATE if depth else UNDRAFTED_AGING_RATE
            self._typical[depth:] = _aged(self._typical[depth:], steps, aging)
            known[depth:] = _aged(known[depth:], taken.sum(axis=0)[lanes], aging)
        self._known[:, slots] = known

    def choose(
        self,
        shapes: tuple[Shape, ...],
        batch: int,
        costs: CostTables,
        slots: Whole,
        *,
        prefilling: int = 0,
        least: float = 0.0,
    ) -> Shape:
        """The shape of a dispatch in which the requests of ``slots`` decode in ``batch`` lanes.

        θ = (N + Σ survivals of the best drafts that fit) / (draft + verify seconds), as in
        `schedule.budget`. Beside prompts θ would count their seconds as the drafts', and draft
        what costs more than its tokens will in later dispatches: there the most tokens are wanted
        beyond those that decoding alone makes in the same time.

        Args:
            prefilling: requests that are not decoding yet, whose prompts the dispatch carries.
            least: seconds that a step takes at least. A host that needs longer for it than the
                device has the same time for any shape, and wants the most tokens.
        """
        if len(shapes) == 1 or not len(slots):
            return shapes[0]
        index = np.asarray(slots, int)
        users, some = len(index), index[:: -(-len(index) // MOST_REQUESTS)]
        room = self._room.take(some)
        # that the slots exist has been seen: to look again takes as long as to copy
        survival = self._known.take(some, axis=1, mode="clip")
        for before, column in itertools.pairwise(survival):
            column *= before
        if room.min() <= len(survival):
            survival *= room > np.arange(1, len(survival) + 1)[:, None]

        prices = _seconds(shapes, batch, costs)
        seconds = _at(float(self._rows.take(index).sum()), costs.contexts, prices)
        seconds = np.maximum(seconds, least)
        tokens = users + _best_sums(survival, shapes, users)
        promised = tokens / seconds
        if prefilling and self._pace:
            pace = self._pace * (users + prefilling)
            return shapes[(tokens - pace * seconds).argmax()]
        best = int(promised.argmax())
        last = self._last.get(shapes, best)
        if promised[last] * (1 + self._step.hysteresis) < promised[best]:
            last = best
        self._last[shapes] = last
        if not prefilling:
            self._pace = float(promised[last]) / users
        return shapes[last]


def _running(taken: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights ``[L]`` of what was known and ``[n, L]`` of each step in a running mean.

    Args:
        taken: ``[n, L]`` the steps that count.
    """
    known, weights = np.ones(taken.shape[1], np.float32), np.empty(taken.shape, np.float32)
    for step, weight in zip(taken[::-1], weights[::-1], strict=True):
        np.multiply(known, step * np.float32(rate), out=weight)
        known -= weight
    return known, weights


def _aged(known: np.ndarray, steps: Any, rate: float) -> np.ndarray:
    """What is known after so many steps that did not measure it."""
    return 1.0 - (1.0 - known) * (1.0 - rate) ** steps


def _best_sums(survival: np.ndarray, shapes: tuple[Shape, ...], users: int) -> np.ndarray:
    """``[n]`` sums of the largest survivals of ``users`` that each shape has room for.

    Args:
        survival: ``[G, N]`` of those, or of some that stand for all.
    """
    each, sums = users / survival.shape[1], []
    for shape in shapes:
        drafts = survival[: shape.depth].ravel()
        left = drafts.size - round((shape.rows - users) / each)
        if left > 0:
            drafts = np.partition(drafts, left)[left:] if left < drafts.size else drafts[:0]
        sums.append(each * drafts.sum())
    return np.array(sums, float)


def _at(x: float, points: Any, values: np.ndarray) -> Any:
    """``values`` at ``x``, linear along their first axis between the increasing ``points``."""
    after = int(np.searchsorted(points, x))
    if after == 0 or after == len(points):
        return values[min(after, len(points) - 1)]
    before = after - 1
    share = (x - points[before]) / (points[after] - points[before])
    return values[before] + share * (values[after] - values[before])


def extremes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The first and the last."""
    return tuple(dict.fromkeys((*shapes[:1], *shapes[-1:])))
