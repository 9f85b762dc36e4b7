"""What each dispatch drafts and verifies: compiled shapes, and the choice among them. Host only.

A step that chose its own depth and rows would branch on the device, and a branch costs a GPU's
host a round trip. So a dispatch has one shape, chosen when it is prepared, from confidences of
steps that have been read: the policy "lagged".
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from dspark_jax.decode.config import Shape
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


class ShapeChoice:
    """Chooses the shape that promises most tokens a second.

    Args:
        slots: requests decoded together.
        depth: drafts of a block, G.
        hysteresis: relative gain below which a program keeps the shape that it had.
    """

    def __init__(self, slots: int, depth: int, hysteresis: float) -> None:
        self._survival = np.ones((slots, depth), np.float32)
        self._room = np.zeros(slots, np.int64)
        self._rows = np.zeros(slots, np.int64)
        self._hysteresis = hysteresis
        self._last: dict[tuple[Shape, ...], Shape] = {}

    def begin(self, slot: int, room: int, rows: int) -> None:
        """A request begins to decode: it is trusted until it has been measured.

        Args:
            room: tokens it may still emit.
            rows: its live cache rows.
        """
        self._survival[slot], self._room[slot], self._rows[slot] = 1.0, room, rows

    def learn(
        self, slots: Sequence[int], confidence: np.ndarray, room: list[int], rows: list[int]
    ) -> None:
        """What has been read of the requests in these slots; ``confidence`` is ``[n, G]``."""
        index = np.asarray(slots, np.int64)
        self._survival[index] = np.cumprod(confidence, axis=1)
        self._room[index], self._rows[index] = room, rows

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
        position = np.arange(1, self._survival.shape[1] + 1)
        survival = np.where(position < room[:, None], self._survival[index], 0.0)
        gained = {0: np.zeros(1)}
        for depth in {shape.depth for shape in shapes if shape.depth}:
            best = np.sort(survival[:, :depth], axis=None)[::-1]
            gained[depth] = np.cumsum(np.append(np.float32(0), best), dtype=np.float64)
        promised = {}
        for shape in shapes:
            sums = gained[shape.depth]
            drafts = min(shape.rows - len(index), len(sums) - 1)
            seconds = np.interp(total, costs.contexts, _seconds(shape, batch, costs))
            promised[shape] = (len(index) + sums[drafts]) / seconds
        best = max(shapes, key=lambda shape: promised[shape])
        last = self._last.get(shapes, best)
        if promised[last] * (1 + self._hysteresis) < promised[best]:
            last = best
        self._last[shapes] = last
        return last


def extremes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The first and the last."""
    return tuple(dict.fromkeys((*shapes[:1], *shapes[-1:])))
