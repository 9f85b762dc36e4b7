"""One measured quantity: its name, its unit, what it says."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike


class Histogram:
    """How many values fell at or below each bound, and beyond the last.

    Args:
        bounds: increasing.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = np.zeros(len(self.bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: ArrayLike, times: int = 1) -> None:
        """Count these values, or one so many times."""
        if isinstance(values, int | float):
            self.counts[bisect.bisect_left(self.bounds, values)] += times
            self.sum += values * times
            return
        found = np.asarray(values, np.float64).reshape(-1)
        at = np.searchsorted(self.bounds, found, side="left")
        self.counts += np.bincount(at, minlength=len(self.counts))
        self.sum += float(found.sum())

    @property
    def count(self) -> int:
        """Values counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without one."""
        return self.sum / self.count if self.count else None


@dataclasses.dataclass(frozen=True)
class Figure:
    """A quantity as it stands.

    Attributes:
        name: Prometheus style, without prefix; a counter's ends in ``_total``.
        kind: a counter only grows, a gauge does what it likes.
        unit: of the value; "1" for shares and counts without a name.
        meaning: one sentence.
        value: a number, None where there is none yet, or a number for each value of ``label``.
        label: what tells the numbers apart.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    value: float | Mapping[str, float] | Histogram | None
    label: str | None = None


def as_json(figures: Iterable[Figure]) -> dict[str, Any]:
    """Values by name. Numbers that do not exist yet are null; a histogram is an object."""
    return {figure.name: _plain(figure.value) for figure in figures}


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return {
            "bounds": list(value.bounds),
            "counts": value.counts.tolist(),
            "sum": value.sum,
            "count": value.count,
        }
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if value is None or math.isnan(value):
        return None
    return value
