"""Costs between the contexts that a table lists. Host only."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float


def between(grid: Any, contexts: Any, seconds: Any) -> Float[np.ndarray, "n"]:
    """Each column of ``seconds`` at its context: linear between those listed, level beyond.

    Args:
        grid: ``[C]`` the contexts listed, increasing.
        contexts: ``[n]``, or one for all columns.
        seconds: ``[C, n]``.
    """
    seconds = np.asarray(seconds)
    if len(grid) == 1:
        return seconds[0]
    place = np.interp(contexts, grid, np.arange(len(grid)))
    before = np.minimum(place.astype(np.intp), len(grid) - 2)
    column = np.arange(seconds.shape[1])
    first, second = seconds[before, column], seconds[before + 1, column]
    return first + (place - before) * (second - first)
