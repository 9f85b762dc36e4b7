"""An evaluation on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 180
LENGTHS = (
    ("generated", "accepted_length", "length, generated"),
    ("generated", "accepted_length_not_looping", "length, not looping"),
    ("generated", "looping", "share looping"),
    ("teacher_forced", "expected_length", "length, teacher-forced"),
)
CALIBRATION = ("ece", "auroc", "brier")


def print_report(report: Mapping[str, Any]) -> None:
    """Lengths by set, acceptance by position, thresholds and calibration of every arm."""
    console = Console(width=WIDTH)
    for arm in report["arms"]:
        title = f"{report['drafter']}, T = {arm['temperature']:g}"
        console.print(f"\n{title}")
        console.print(_lengths(arm))
        pooled = arm.get("all_sets")
        if pooled:
            console.print(f"\n{title}, all sets: full blocks cut at a confidence threshold")
            console.print(_thresholds(pooled))
            console.print(f"\n{title}, all sets: survival against accepted prefixes")
            console.print(_calibration(pooled["calibration"]))


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _lengths(arm: Mapping[str, Any]) -> Table:
    sets = {**arm["sets"], "macro": arm["macro"]}
    table = Table("figure", *sets, box=None)
    for kind, name, label in LENGTHS:
        if kind in arm["macro"]:
            values = [sets[one].get(kind, {}).get(name) for one in sets]
            table.add_row(label, *map(number, values))
    for kind, label in (("generated", "generated"), ("teacher_forced", "teacher-forced")):
        if kind in arm["macro"]:
            by_position = arm["macro"][kind]["conditional_acceptance"]
            for position in range(len(by_position)):
                values = [
                    sets[one][kind]["conditional_acceptance"][position]
                    if kind in sets[one]
                    else None
                    for one in sets
                ]
                table.add_row(f"accepted at {position + 1}, {label}", *map(number, values))
    return table


def _thresholds(pooled: Mapping[str, Any]) -> Table:
    rows: Sequence[Mapping[str, Any]] = pooled["thresholds"]
    table = Table(
        "threshold",
        *(f"{row['threshold']:.1f}" for row in rows),
        box=None,
    )
    for name, label in (
        ("acceptance", "acceptance"),
        ("tokens_a_step", "tokens a step"),
        ("verified", "drafts verified"),
    ):
        for which, suffix in (("thresholds", ""), ("thresholds_calibrated", ", calibrated")):
            if which in pooled:
                table.add_row(label + suffix, *(number(row[name]) for row in pooled[which]))
    return table


def _calibration(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "position",
        *(str(row["position"]) for row in rows),
        box=None,
    )
    for name in CALIBRATION:
        for suffix in ("before", "after"):
            values = [row[f"{name}_{suffix}"] for row in rows]
            if any(value is not None for value in values):
                label = name.upper() if name != "brier" else "Brier"
                table.add_row(f"{label} {suffix} STS", *(number(value, 3) for value in values))
    return table
