"""Sequential temperature scaling by grid search (DSpark paper, section 3)."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from dspark_jax.calibration.blocks import MINIMUM_REACHED, VerifiedBlocks, sigmoid
from dspark_jax.calibration.metrics import BINS, expected_calibration_error

LOWEST, HIGHEST = 0.1, 10.0
GRID = np.geomspace(LOWEST, HIGHEST, 81)
"""Temperatures tried, 6 % apart; every second one is a point of SGLang's grid."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """Fitted temperatures.

    Attributes:
        temperatures: ``[G]`` STS temperatures, 1 where there was too little data.
        shrunk: ``[G]`` positions left at 1 for that reason.
    """

    temperatures: Float[np.ndarray, "G"]
    shrunk: Bool[np.ndarray, "G"]


def fit_grid(blocks: VerifiedBlocks, *, minimum: int = MINIMUM_REACHED) -> Fit:
    """Left to right, the temperature that minimises the ECE of the cumulative product.

    With earlier temperatures frozen, T_k = argmin over ``GRID`` of the ECE (15 equal-width bins)
    of Π_{i<k} σ(z_i / T_i) · σ(z_k / T) against "the first k drafts were accepted". Among equals
    the one nearest to 1 wins, so labels that tell nothing change nothing.

    Positions that fewer than ``minimum`` blocks reach keep temperature 1.
    """
    temperatures = np.ones(blocks.block_size)
    shrunk = blocks.sparse(minimum)
    nearest_first = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before = np.ones(len(blocks))
    for position in range(blocks.block_size):
        logits = blocks.logits[:, position]
        if not shrunk[position]:
            known = blocks.labelled[:, position]
            product, own = before[known], logits[known]
            label = blocks.survived[known, position]
            errors = [
                expected_calibration_error(product * sigmoid(own / temperature), label, BINS)
                for temperature in nearest_first
            ]
            temperatures[position] = nearest_first[int(np.argmin(errors))]
        before = before * sigmoid(logits / temperatures[position])
    return Fit(temperatures, shrunk)
