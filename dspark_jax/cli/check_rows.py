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
    found, wanted = _same_shape(name, found, wanted)
    error = np.abs(found.astype(np.float64) - wanted)
    chosen = error[np.broadcast_to(where, error.shape)]
    return Row(name, "absolute", float(chosen.max(initial=0.0)), ABSOLUTE_TOLERANCE)


def relative(name: str, found: Any, wanted: Any) -> Row:
    """Largest difference relative to the recorded value (to 1 where that is below 1e-12)."""
    found, wanted = _same_shape(name, found, wanted)
    scale = np.where(np.abs(wanted) > 1e-12, np.abs(wanted), 1.0)
    error = np.abs(found.astype(np.float64) - wanted) / scale
    return Row(name, "relative", float(error.max(initial=0.0)), RELATIVE_TOLERANCE)


def identical(name: str, found: Any, wanted: Any, where: Any = True) -> Row:
    """Number of entries that differ, where the mask ``where`` is true."""
    found, wanted = _same_shape(name, found, wanted)
    differing = (found != wanted) & np.broadcast_to(where, wanted.shape)
    return Row(name, "differing entries", float(differing.sum()), 0.0)


def _same_shape(name: str, found: Any, wanted: Any) -> tuple[np.ndarray, np.ndarray]:
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        raise ValueError(f"{name}: computed shape {found.shape}, recorded shape {wanted.shape}")
    return found, wanted
