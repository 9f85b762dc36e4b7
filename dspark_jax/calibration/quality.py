"""Calibration figures of every position, with and without STS."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from dspark_jax.calibration.blocks import VerifiedBlocks, cumulative_survival
from dspark_jax.calibration.metrics import auroc, brier, expected_calibration_error


@dataclasses.dataclass(frozen=True)
class PositionQuality:
    """Figures of one position; "before" is with all temperatures 1, "after" with those given.

    ECE, Brier and ``auroc`` are those of the cumulative product against "accepted up to here",
    over all blocks with a label. ``conditional_auroc`` is that of the position's own confidence
    among blocks that reach it: a temperature cannot change it. None stands for a figure that the
    labels do not define: no block, or labels of one kind.
    """

    position: int
    blocks: int
    reached: int
    temperature: float
    observed: float | None
    predicted_before: float | None
    predicted_after: float | None
    ece_before: float | None
    ece_after: float | None
    brier_before: float | None
    brier_after: float | None
    auroc_before: float | None
    auroc_after: float | None
    conditional_auroc_before: float | None
    conditional_auroc_after: float | None


def measure(
    blocks: VerifiedBlocks, temperatures: Float[np.ndarray, "G"]
) -> tuple[PositionQuality, ...]:
    """Figures of ``blocks`` under ``temperatures``, one for each position."""
    temperatures = np.asarray(temperatures, np.float64)
    before = cumulative_survival(blocks.logits, np.ones_like(temperatures))
    after = cumulative_survival(blocks.logits, temperatures)
    return tuple(
        _position(blocks, position, float(temperatures[position]), before, after)
        for position in range(blocks.block_size)
    )


def _position(
    blocks: VerifiedBlocks,
    position: int,
    temperature: float,
    before: Float[np.ndarray, "N G"],
    after: Float[np.ndarray, "N G"],
) -> PositionQuality:
    known, reached = blocks.labelled[:, position], blocks.reached[:, position]
    label = blocks.survived[known, position]
    raw, scaled = before[known, position], after[known, position]
    own, own_label = blocks.logits[reached, position], blocks.survived[reached, position]

    def figure(measured, *values) -> float | None:
        found = float(measured(*values)) if len(values[0]) else np.nan
        return None if np.isnan(found) else found

    return PositionQuality(
        position=position + 1,
        blocks=int(known.sum()),
        reached=int(reached.sum()),
        temperature=temperature,
        observed=figure(np.mean, label),
        predicted_before=figure(np.mean, raw),
        predicted_after=figure(np.mean, scaled),
        ece_before=figure(expected_calibration_error, raw, label),
        ece_after=figure(expected_calibration_error, scaled, label),
        brier_before=figure(brier, raw, label),
        brier_after=figure(brier, scaled, label),
        auroc_before=figure(auroc, raw, label),
        auroc_after=figure(auroc, scaled, label),
        conditional_auroc_before=figure(auroc, own, own_label),
        conditional_auroc_after=figure(auroc, own / temperature, own_label),
    )
