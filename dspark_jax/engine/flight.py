"""A dispatch on its way: what was launched, when it ended, and what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dspark_jax.decode.config import Shape
from dspark_jax.engine.lanes import Report
from dspark_jax.engine.packing import Packed, unpack
from dspark_jax.engine.scheduler import Plan


@dataclasses.dataclass
class Leg:
    """One launch of a dispatch.

    Attributes:
        steps: that it takes.
        pieces: pieces of prompts it was compiled for.
        shape: what its steps draft and verify; None where they decide it themselves.
        ended: when the host has seen it end, seconds on the engine's clock; None until it is read.
        waited: whether the host was waiting for it then, so that ``ended`` is no later.
        ahead: whether the device was still busy with what comes before when it had been launched.
    """

    steps: int
    pieces: int
    shape: Shape | None
    ended: float | None = None
    waited: bool = False
    ahead: bool = False


@dataclasses.dataclass
class Flight:
    """A dispatch that may still be running.

    Attributes:
        plan: what was asked for.
        slots, requests, lanes: ``[n]`` of those that decode in it: their slots, arrival numbers and
            lanes.
        launched: what the steps of each leg did, on the device, when all have been launched there.
        batch: lanes it was compiled for.
        legs: in the order they run.
        sent: when it was dispatched, seconds on the engine's clock.
    """

    plan: Plan
    slots: np.ndarray
    requests: np.ndarray
    lanes: np.ndarray
    launched: Future[list[Packed]]
    batch: int
    legs: list[Leg]
    sent: float = 0.0

    def wait(self, clock: Callable[[], float]) -> None:
        """Return when it has ended.

        Raises:
            Exception: what went wrong on the device.
        """
        if self.legs[-1].ended is not None:
            return
        launched = self.launched.done()
        for leg, report in zip(self.legs, self.launched.result(), strict=True):
            words: Any = report.words
            leg.waited = not (launched and words.is_ready())
            words.block_until_ready()
            leg.ended = clock()
            launched = True

    def read(self) -> Report:
        """Its outcomes on the host; it has been waited for."""
        packed = self.launched.result()
        words = jax.device_get([one.words for one in packed])
        layouts = [one.layout for one in packed]
        reports = [unpack(Packed(*one)) for one in zip(words, layouts, strict=True)]
        if len(reports) == 1:
            return reports[0]
        return jax.tree.map(lambda *legs: np.concatenate(legs), *reports)
