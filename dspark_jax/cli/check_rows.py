"""Comparisons of a computed tensor with a recorded one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

ABSOLUTE_TOLERANCE = 2e-4
RELATIVE_TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Row:
    """The largest error of one tensor; ``measure`` says of which kind."""

    name: str
    measure: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the error is within tolerance (NaN never is)."""
        return self.error <= self.tolerance


def absolute(name: str, found: Any, wanted: Any, where: Any = True) -> Row:
    """Largest absolute difference, where the mask ``where`` is true."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        return Row(name, _shapes(found, wanted), np.inf, ABSOLUTE_TOLERANCE)
    error = np.abs(found - wanted)[np.broadcast_to(where, wanted.shape)]
    return Row(name, "absolute", float(error.max(initial=0.0)), ABSOLUTE_TOLERANCE)


def relative(name: str, found: Any, wanted: Any) -> Row:
    """Largest difference relative to the recorded value (to 1 where that is 0)."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        return Row(name, _shapes(found, wanted), np.inf, RELATIVE_TOLERANCE)
    error = np.abs(found - wanted) / np.where(wanted == 0, 1.0, np.abs(wanted))
    return Row(name, "relative", float(error.max(initial=0.0)), RELATIVE_TOLERANCE)


def identical(name: str, found: Any, wanted: Any, where: Any = True) -> Row:
    """Number of entries that differ, where the mask ``where`` is true."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return Row(name, _shapes(found, wanted), np.inf, 0.0)
    differing = (found != wanted) & np.broadcast_to(where, wanted.shape)
    return Row(name, "differing", float(differing.sum()), 0.0)


def _shapes(found: np.ndarray, wanted: np.ndarray) -> str:
    return f"shape {found.shape}, recorded {wanted.shape}"
