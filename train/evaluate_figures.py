"""The figures of an evaluation as PNG, in the manner of the paper's figures 2, 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration.blocks import VerifiedBlocks
from dspark_jax.calibration.plots import draw_reliability
from dspark_jax.calibration.quality import measure

ACCEPTANCE, THRESHOLDS = "acceptance.png", "thresholds.png"
SHARES = (-0.02, 1.02)


def draw_figures(
    report: Mapping[str, Any], blocks: Sequence[VerifiedBlocks | None], folder: Path
) -> None:
    """Draw what the report has figures for; ``blocks`` are those of its arms.

    Acceptance by position (figure 2), acceptance and tokens a step over confidence thresholds
    (figure 5), reliability before and after STS (figure 6, a file a temperature).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    arms = report["arms"]
    _draw(arms, _acceptance, "position", "conditional acceptance", folder / ACCEPTANCE)
    with_thresholds = [arm for arm in arms if "all_sets" in arm]
    if with_thresholds:
        _draw_thresholds(with_thresholds, folder / THRESHOLDS)
    for arm, own in zip(arms, blocks, strict=True):
        if own is not None:
            scale = arm["sts_temperatures"]
            scale = None if scale is None else np.asarray(scale, np.float64)
            draw_reliability(
                own,
                scale,
                measure(own, np.ones(own.block_size) if scale is None else scale),
                folder / f"reliability-T{arm['temperature']:g}.png",
                f"{report['drafter']}, T = {arm['temperature']:g}, all sets",
            )


def _figure(columns: int) -> Any:
    """A figure without a window; matplotlib loads only here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.8), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure


def _acceptance(panel: Any, arm: Mapping[str, Any]) -> None:
    for name, figures in arm["sets"].items():
        kind = "generated" if "generated" in figures else "teacher_forced"
        values = figures[kind]["conditional_acceptance"]
        heights = [np.nan if value is None else value for value in values]
        panel.plot(range(1, len(heights) + 1), heights, marker="o", markersize=4, label=name)
    panel.set_ylim(*SHARES)


def _draw(arms: Sequence[Mapping[str, Any]], draw: Any, across: str, up: str, path: Path) -> None:
    """A panel a temperature."""
    figure = _figure(len(arms))
    panels = figure.subplots(1, len(arms), squeeze=False)[0]
    for panel, arm in zip(panels, arms, strict=True):
        draw(panel, arm)
        panel.set_title(f"T = {arm['temperature']:g}", fontsize=10)
        panel.set_xlabel(across)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(up)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path)


def _draw_thresholds(arms: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Acceptance (solid, left) and tokens a step (dashed, right) of every set."""
    figure = _figure(len(arms))
    panels = figure.subplots(1, len(arms), squeeze=False)[0]
    for panel, arm in zip(panels, arms, strict=True):
        other = panel.twinx()
        generated = {
            name: figures["generated"]
            for name, figures in arm["sets"].items()
            if "generated" in figures
        }
        for place, (name, figures) in enumerate(generated.items()):
            rows = figures["thresholds"]
            across = [row["threshold"] for row in rows]
            share = [np.nan if row["acceptance"] is None else row["acceptance"] for row in rows]
            panel.plot(across, share, color=f"C{place}", marker="o", markersize=3, label=name)
            tokens = [row["tokens_a_step"] for row in rows]
            other.plot(across, tokens, color=f"C{place}", linestyle="--", linewidth=1.2)
        panel.set_ylim(*SHARES)
        panel.set_title(f"T = {arm['temperature']:g}", fontsize=10)
        panel.set_xlabel("confidence threshold")
        panel.grid(alpha=0.3)
        panel.set_ylabel("accepted share of kept drafts (solid)")
        other.set_ylabel("tokens a step (dashed)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path)
