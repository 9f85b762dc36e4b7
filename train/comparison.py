"""Two evaluations side by side, if they were made under the same conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from train.evaluate_table import WIDTH, number
from train.run_folder import flat

LENGTH = {"generated": "accepted_length", "teacher_forced": "expected_length"}


def read_report(path: Path) -> dict[str, Any]:
    """An ``evaluation.json``.

    Raises:
        ValueError: something else.
        FileNotFoundError: no such file.
    """
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(report, dict) or not {"conditions", "arms", "drafter"} <= set(report):
        raise ValueError(f"{path} is no report of dspark evaluate")
    return report


def compare(first: Path, second: Path) -> list[dict[str, Any]]:
    """Lengths of two runs, and accepted drafts (length - 1) of the first over the second's.

    Returns:
        A row for each temperature and kind of figure: ``temperature``, ``figure`` and ``sets``,
        which holds ``first``, ``second`` and ``ratio`` for each set and for the macro average.

    Raises:
        ValueError: runs that differ in target, dtype, template, thinking mode, temperature,
            length limit or sets; names the condition and both values.
    """
    one, other = read_report(first), read_report(second)
    here, there = flat(one["conditions"]), flat(other["conditions"])
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"{first} and {second} are not compared: {name} is {here.get(name)!r} in the "
                f"first and {there.get(name)!r} in the second"
            )
    rows = []
    for mine, yours in zip(one["arms"], other["arms"], strict=True):
        for kind, length in LENGTH.items():
            if kind in mine["macro"] and kind in yours["macro"]:
                sets = {**mine["sets"], "macro": mine["macro"]}
                theirs = {**yours["sets"], "macro": yours["macro"]}
                rows.append(
                    {
                        "temperature": mine["temperature"],
                        "figure": kind,
                        "sets": {
                            name: _pair(sets[name][kind][length], theirs[name][kind][length])
                            for name in sets
                            if kind in sets[name]
                        },
                    }
                )
    return rows


def _pair(first: float | None, second: float | None) -> dict[str, float | None]:
    ratio = None
    if first is not None and second is not None and second > 1:
        ratio = (first - 1) / (second - 1)
    return {"first": first, "second": second, "ratio": ratio}


def print_comparison(first: Path, second: Path) -> None:
    """``compare`` as a table; raises as it does."""
    rows = compare(first, second)
    names = [read_report(path)["drafter"] for path in (first, second)]
    sets: dict[str, None] = dict.fromkeys(name for row in rows for name in row["sets"])
    table = Table("T", "length", "drafter", *sets, box=None)
    for row in rows:
        head = (f"{row['temperature']:g}", row["figure"].replace("_", "-"))
        for label, which in (*zip(names, ("first", "second"), strict=True), ("ratio", "ratio")):
            shown = "accepted drafts, first/second" if which == "ratio" else label
            table.add_row(*head, shown, *(_cell(row["sets"], name, which) for name in sets))
    Console(width=WIDTH).print(table)


def _cell(sets: Mapping[str, Mapping[str, float | None]], name: str, which: str) -> str:
    return number(sets[name][which]) if name in sets else "-"
