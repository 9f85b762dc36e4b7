"""The three figures of a bench: what the policy does, what steps cost, what users and machine get.

The only module of ``bench`` that needs matplotlib (the train extra).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dspark_jax.schedule.cost import TierCosts

ADAPTIVE = "#d1603d"
FIXED = "viridis"


def draw_all(
    folder: Path, arms: Sequence[dict[str, Any]], block_size: int, title: str
) -> list[Path]:
    """Draw policy and throughput; the paths written."""
    written = []
    measured = [arm for arm in arms if "tokens_per_second" in arm]
    compact = [arm for arm in measured if arm["arm"] == "compact"]
    if compact:
        written.append(
            _save(folder / "policy.png", title, lambda a: _policy(a, compact, block_size))
        )
    if measured:
        name = "throughput_interactivity.png"
        written.append(_save(folder / name, title, lambda a: _throughput(a, measured)))
    return written


def draw_costs(
    path: Path, tiers: Sequence[TierCosts], samples: Sequence[dict[str, Any]], title: str
) -> Path:
    """Draw the curves that decide budgets, a panel a tier, and the timings behind them.

    Args:
        path: of the picture.
        samples: as a cost table lists them; none where it does not.
    """
    figure = Figure(figsize=(2.0 + 4.4 * len(tiers), 4.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, len(tiers), squeeze=False)[0]
    for axes, tier in zip(panels, tiers, strict=True):
        own = [one for one in samples if one.get("requests") in (None, tier.requests)]
        axes.grid(alpha=0.3)
        _costs(axes, tier, own)
    figure.savefig(path)
    return path


def _policy(axes: Axes, arms: Sequence[dict[str, Any]], block_size: int) -> None:
    """Rows a window against load, with the middle 80 % of windows, and what they bring."""
    users = [arm["concurrency"] for arm in arms]
    axes.fill_between(
        users,
        [arm["window_p10"] for arm in arms],
        [arm["window_p90"] for arm in arms],
        color=ADAPTIVE,
        alpha=0.2,
        label="middle 80 % of windows",
    )
    windows = [arm["mean_window"] for arm in arms]
    axes.plot(users, windows, color=ADAPTIVE, marker="o", label="rows verified a request")
    accepted = [arm["accepted_length"] for arm in arms]
    axes.plot(users, accepted, color="0.3", marker="s", label="tokens committed a request")
    axes.axhline(block_size + 1, color="0.7", linestyle="--", label="full block")
    axes.set_ylim(0, block_size + 1.5)
    _by_load(axes, users)
    axes.set_ylabel("a step")
    axes.legend(fontsize=8)


def _costs(axes: Axes, tier: TierCosts, samples: Sequence[dict[str, Any]]) -> None:
    """Milliseconds of a verification against its rows, a colour a context; dotted: of drafting."""
    contexts = tier.contexts
    rows = np.arange(1, int(tier.verify.sizes[-1]) + 1)
    verify = 1e3 * tier.verify.at(rows)
    draft = 1e3 * tier.draft.at(tier.draft.sizes[-1:])[:, 0]
    for context, curve, level, shade in zip(
        contexts, verify, draft, _shades(len(contexts)), strict=True
    ):
        axes.plot(rows, curve, color=shade, label=f"{context:.0f} cache rows")
        axes.axhline(level, color=shade, linestyle=":", linewidth=1)
        for sample in samples:
            if sample["kind"] == "verify" and sample["rows"] == context:
                seconds = 1e3 * np.asarray(sample["seconds"])
                sizes = np.full(len(seconds), sample["size"])
                axes.plot(sizes, seconds, linestyle="", marker=".", color=shade, alpha=0.5)
    largest = min(tier.verify.largest_bucket, rows[-1])
    axes.axvline(largest, color="0.7", linestyle="--", linewidth=1)
    axes.set_title(
        "any number of requests" if tier.requests is None else f"up to {tier.requests} requests",
        fontsize=9,
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows verified in a step (dashed: largest bucket)")
    axes.set_ylabel("ms (dotted: drafting)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _throughput(axes: Axes, arms: Sequence[dict[str, Any]]) -> None:
    """Output tokens a second of the machine against those that a user sees, a line an arm."""
    names = list(dict.fromkeys(arm["arm"] for arm in arms))
    for name, shade in zip(names, _shades(len(names)), strict=True):
        own = [arm for arm in arms if arm["arm"] == name]
        axes.plot(
            [arm["interactivity"] for arm in own],
            [arm["tokens_per_second"] for arm in own],
            marker="o",
            markersize=4,
            color=ADAPTIVE if name == "compact" else shade,
            linewidth=2.4 if name == "compact" else 1.2,
            linestyle="--" if name == "cap-accept" else "-",
            label=name,
        )
    for arm in arms:
        if arm["arm"] == names[-1]:
            at = (arm["interactivity"], arm["tokens_per_second"])
            axes.annotate(
                str(arm["concurrency"]), at, fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens/s of a user (median)")
    axes.set_ylabel("tokens/s of the machine")
    axes.legend(fontsize=8)


def _by_load(axes: Axes, users: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(one) for one in users])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")


def _shades(count: int) -> list[Any]:
    return [matplotlib.colormaps[FIXED](share) for share in np.linspace(0.1, 0.9, count)]


def _save(path: Path, title: str, draw: Callable[[Axes], None]) -> Path:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    draw(axes)
    figure.savefig(path)
    return path
