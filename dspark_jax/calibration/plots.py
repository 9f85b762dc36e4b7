"""Reliability diagrams in the manner of the paper's figure 6.

The only module of the package that needs matplotlib (the train extra); nothing in ``dspark_jax``
imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dspark_jax.calibration.blocks import VerifiedBlocks, cumulative_survival
from dspark_jax.calibration.metrics import BINS, reliability_bins
from dspark_jax.calibration.quality import PositionQuality

COLUMNS = 4
FEWEST = 10
"""Blocks a bin must hold to be drawn: the share accepted of fewer is mostly chance."""

BEFORE, AFTER = "#d1603d", "#2f6690"


def draw_reliability(
    blocks: VerifiedBlocks,
    temperatures: Float[np.ndarray, "G"] | None,
    quality: Sequence[PositionQuality],
    path: Path,
    title: str,
) -> None:
    """A panel a position: predicted survival against the share accepted, before and after STS.

    Under each panel the share of blocks in each bin; above it the ECE before and after and the
    AUROC. Positions without a label are left out, and so are bins of fewer than ``FEWEST`` blocks.
    Without ``temperatures`` there is no "after".
    """
    drawn = [figures for figures in quality if figures.blocks]
    columns = min(COLUMNS, max(len(drawn), 1))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(2.9 * columns, 0.6 + 3.9 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    before = cumulative_survival(blocks.logits, np.ones(blocks.block_size))
    curves = [(before, BEFORE, "before")]
    if temperatures is not None:
        after = cumulative_survival(blocks.logits, np.asarray(temperatures, np.float64))
        curves.append((after, AFTER, "after STS"))
    panels = figure.add_gridspec(rows, columns)
    for index, figures in enumerate(drawn):
        position = figures.position - 1
        cell = panels[index // columns, index % columns].subgridspec(
            2, 1, height_ratios=(4, 1), hspace=0.05
        )
        diagram = figure.add_subplot(cell[0])
        shares = figure.add_subplot(cell[1], sharex=diagram)
        known = blocks.labelled[:, position]
        label = blocks.survived[known, position]
        diagram.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1)
        for survival, colour, name in curves:
            bins = reliability_bins(survival[known, position], label)
            filled = bins.count >= FEWEST
            diagram.plot(
                bins.predicted[filled],
                bins.observed[filled],
                color=colour,
                marker="o",
                markersize=3,
                linewidth=1.4,
                label=name,
            )
            middles = (np.arange(BINS) + 0.5) / BINS
            shares.bar(middles, bins.count / bins.count.sum(), 1 / BINS, color=colour, alpha=0.55)
        diagram.set_title(_caption(figures, temperatures is not None), fontsize=8)
        diagram.set_xlim(0, 1)
        diagram.set_ylim(0, 1)
        diagram.tick_params(labelbottom=False, labelsize=7)
        shares.tick_params(labelsize=7)
        shares.set_xlabel("predicted survival", fontsize=8)
        if index % columns == 0:
            diagram.set_ylabel("share accepted", fontsize=8)
            shares.set_ylabel("blocks", fontsize=8)
        if index == 0:
            diagram.legend(fontsize=7, loc="upper left", frameon=False)
    figure.savefig(path)


def _caption(figures: PositionQuality, calibrated: bool) -> str:
    assert figures.ece_before is not None
    assert figures.ece_after is not None
    auroc = "undefined" if figures.auroc_after is None else f"{figures.auroc_after:.3f}"
    error = f"ECE {100 * figures.ece_before:.1f} %"
    if not calibrated:
        return f"position {figures.position}\n{error}, AUROC {auroc}"
    return (
        f"position {figures.position}, T = {figures.temperature:.2f}\n"
        f"{error} to {100 * figures.ece_after:.1f} %, AUROC {auroc}"
    )
