"""What each dispatch drafts and verifies: compiled shapes, and the choice among them. Host only.

A step that chose its own depth and rows would branch on the device, and a branch costs a GPU's
host a round trip. So a dispatch has one shape, chosen when it is prepared, from confidences of
steps that have been read: the policy "lagged".
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.engine.lanes import Report
from dspark_jax.schedule.cost import CostTables

LEAST_SAVING = 0.05
"""A shape that saves less of a step than this, against the next larger one, is left out."""

DEEPER = 2
"""Depths walked beyond an even share of the rows, so that there are drafts to choose from."""


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


def paying_shapes(shapes: Sequence[Shape], batch: int, costs: CostTables) -> tuple[Shape, ...]:
    """Those of ``shapes`` that save time; the first and the last stay."""
    seconds = [np.mean(_seconds(shape, batch, costs)) for shape in shapes]
    kept = [len(shapes) - 1]
    for index in range(len(shapes) - 2, 0, -1):
        if seconds[index] <= (1 - LEAST_SAVING) * seconds[kept[0]]:
            kept.insert(0, index)
    return tuple(shapes[index] for index in (0, *kept))


def _seconds(shape: Shape, batch: int, costs: CostTables) -> np.ndarray:
    """``[C]`` seconds of a step of ``batch`` lanes at each context of the table."""
    verify = np.asarray(costs.verify)[:, shape.rows]
    if not shape.depth:
        return verify
    return verify + np.asarray(costs.draft)[:, batch] * np.asarray(costs.walk)[shape.depth - 1]


AGING_RATE = 1 / 256
"""Share of the distance to 1 that a confidence covers in a step that did not measure it.

Slower than in `schedule.survival`: what is tried again is tried for a whole dispatch.
"""

TYPICAL_RATE = 0.05
"""Weight of a step's mean confidences in those that a new request begins with."""


@dataclasses.dataclass
class _Step:
    """What one step measured of the requests in ``slots``; ``confidence`` is ``[n, G]``."""

    slots: np.ndarray
    taken: np.ndarray
    confidence: np.ndarray
    depth: int


class ShapeChoice:
    """Chooses the shape that promises most tokens a second.

    Args:
        slots: requests decoded together.
        step: block size, lag, smoothing and hysteresis are taken from it.
    """

    def __init__(self, slots: int, step: StepConfig) -> None:
        self._known = np.ones((step.depth, slots), np.float32)
        self._typical = np.ones(step.depth, np.float32)
        self._room = np.zeros(slots, np.int64)
        self._rows = np.zeros(slots, np.int64)
        self._step = step
        self._held: deque[_Step] = deque()
        self._last: dict[tuple[Shape, ...], Shape] = {}

    def begin(self, slot: int, room: int, rows: int) -> None:
        """A request begins to decode: it is taken for a typical one until it has been measured.

        The first of all are trusted. A short answer may end before its first dispatch is read.

        Args:
            room: tokens it may still emit.
            rows: its live cache rows.
        """
        self._known[:, slot], self._room[slot], self._rows[slot] = self._typical, room, rows
        for step in self._held:
            step.taken[step.slots == slot] = False

    def learn(
        self,
        slots: Sequence[int],
        lanes: Sequence[int],
        report: Report,
        room: list[int],
        rows: list[int],
    ) -> None:
        """What a dispatch that has been read says of the requests in ``slots``.

        Args:
            lanes: where they decoded in it.
            report: on the host.
            room, rows: as in `begin`, after the dispatch.
        """
        index, lane = np.asarray(slots, np.int64), np.asarray(lanes, np.int64)
        self._room[index], self._rows[index] = room, rows
        decision = report.outcome.decision
        assert decision is not None, "only modes that draft have shapes"
        for step in range(int(report.done)):
            taken = np.asarray(report.outcome.count)[step, lane] > 0
            confidence = np.asarray(decision.confidence)[step, lane]
            depth = int(np.asarray(decision.depth)[step])
            self._held.append(_Step(index, taken, confidence, depth))
        # The next dispatch to be planned begins two steps later at least: one is in flight.
        while len(self._held) > max(self._step.lag - 2, 0):
            self._remember(self._held.popleft())

    def _remember(self, step: _Step) -> None:
        """As `schedule.survival.remember`."""
        slots, depth = step.slots[step.taken], step.depth
        known, confidence = self._known[:, slots], step.confidence[step.taken].T
        if len(slots):
            mean = confidence[:depth].mean(axis=1)
            self._typical[:depth] += TYPICAL_RATE * (mean - self._typical[:depth])
            self._typical[depth:] += AGING_RATE * (1.0 - self._typical[depth:])
        known[:depth] += self._step.smoothing * (confidence[:depth] - known[:depth])
        known[depth:] += AGING_RATE * (1.0 - known[depth:])
        self._known[:, slots] = known

    def choose(
        self, shapes: tuple[Shape, ...], batch: int, costs: CostTables, slots: Sequence[int]
    ) -> Shape:
        """The shape of a dispatch in which the requests of ``slots`` decode in ``batch`` lanes.

        θ = (N + Σ survivals of the best drafts that fit) / (draft + verify seconds), as in
        `schedule.budget`.
        """
        if len(shapes) == 1 or not len(slots):
            return shapes[0]
        index = np.asarray(slots, np.int64)
        room, total = self._room[index], self._rows[index].sum()
        survival = self._known[:, index]
        ending = room.min() <= len(survival)
        for position, column in enumerate(survival):
            if position:
                column *= survival[position - 1]
            if ending:
                column *= room > position + 1
        ordered = {
            depth: np.sort(survival[:depth], axis=None)
            for depth in {shape.depth for shape in shapes}
        }
        promised = {}
        for shape in shapes:
            survivals, drafts = ordered[shape.depth], shape.rows - len(index)
            gained = survivals[max(len(survivals) - drafts, 0) :].sum(dtype=np.float64)
            seconds = np.interp(total, costs.contexts, _seconds(shape, batch, costs))
            promised[shape] = (len(index) + gained) / seconds
        best = max(shapes, key=lambda shape: promised[shape])
        last = self._last.get(shapes, best)
        if promised[last] * (1 + self._step.hysteresis) < promised[best]:
            last = best
        self._last[shapes] = last
        return last


def extremes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The first and the last."""
    return tuple(dict.fromkeys((*shapes[:1], *shapes[-1:])))
