"""Which positions of a recording its model decides, and which the recorder's order of sorting.

An indexer gives a row that none of its heads responds to a score of exactly 0. Where several such
rows compete for the last places, implementations differ, and so do all later positions that read
the result. These are left out of a comparison.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from dspark_jax.cli.check_rows import Row, absolute

TIE = 1e-6
"""Scores that are nearer to each other may swap by rounding."""


def decided(margins: Float[np.ndarray, "L S W"]) -> Bool[np.ndarray, "L+1 S W"]:
    """Where the embedding (entry 0) and the output of each layer follow from the equations.

    ``margins`` say how far the last row chosen lies above the first one left out.
    """
    clear = [np.ones(margins.shape[1:], bool)]
    for margin in margins:
        # a layer may read the rows of every earlier position
        clear.append(np.logical_and.accumulate(clear[-1], axis=1) & (margin > TIE))
    return np.stack(clear)


def absolute_where(name: str, found: Any, wanted: Any, clear: Bool[np.ndarray, "S W"]) -> Row:
    """``absolute`` at the positions that are ``clear``; its measure says if not all are.

    Raises:
        ValueError: no position is clear.
    """
    if not clear.any():
        raise ValueError(f"{name} has no position that the model decides: record another text")
    row = absolute(name, found, wanted, clear[..., None])
    if clear.all():
        return row
    measure = f"{row.measure}, {clear.sum()} of {clear.size} positions"
    return dataclasses.replace(row, measure=measure)
