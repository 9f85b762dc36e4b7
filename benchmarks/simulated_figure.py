"""Budget per request and throughput against load, of a simulated target; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(path: Path, arms: Sequence[dict[str, Any]], title: str) -> Path:
    """Draw what each request's budget is and what each arm brings, over plain decoding if it ran.

    Args:
        path: of the picture.
        arms: entries that `benchmarks.simulated_target` writes.
        title: says that this is a simulation.
    """
    figure = Figure(figsize=(10.0, 4.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    left, right = figure.subplots(1, 2)
    users = sorted({arm["concurrency"] for arm in arms})
    for name in ("compact", "cap-accept"):
        own = [arm for arm in arms if arm["arm"] == name]
        if own:
            at = [arm["concurrency"] for arm in own]
            budgets = [arm["budget_per_request"] for arm in own]
            accepted = [arm["accepted_length"] - 1 for arm in own]
            left.plot(at, budgets, marker="o", label=f"{name}: budget")
            left.plot(at, accepted, marker="s", linestyle=":", label=f"{name}: accepted")
    left.set_ylabel("drafts a request and step")
    relative = all(arm.get("ratio_to_off") for arm in arms)
    for name in dict.fromkeys(arm["arm"] for arm in arms):
        own = [arm for arm in arms if arm["arm"] == name]
        wanted = "ratio_to_off" if relative else "tokens_per_second"
        width = 2.4 if name == "compact" else 1.2
        at = [arm["concurrency"] for arm in own]
        right.plot(at, [arm[wanted] for arm in own], marker="o", linewidth=width, label=name)
    right.set_ylabel("throughput over plain decoding" if relative else "tokens/s")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(users, [str(one) for one in users])
        axes.minorticks_off()
        axes.set_xlabel("concurrent requests")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path)
    return path
