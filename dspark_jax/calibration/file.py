"""Calibration files: STS temperatures of the confidence head, by sampling temperature.

The file is JSON::

    {"entries": [{"temperature": 0.0, "temperatures": [1.1, 1.2], "num_samples": 20000,
                  "ece_before": [0.05, 0.07], "ece_after": [0.01, 0.02]}]}

``temperature`` is the sampling temperature whose acceptances the entry was fitted on (0 =
greedy), ``temperatures`` holds one STS temperature a drafted position. What the file was made
with may stand beside the entries under ``made_with``. SGLang's file, one entry without a sampling
temperature, is read as greedy: it is fitted on greedy matches.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.json_file import read_object

DISTANT = 0.15
"""Sampling temperatures further apart than this accept differently enough to be told."""


@dataclasses.dataclass(frozen=True)
class CalibrationEntry:
    """STS temperatures for one sampling temperature; per-position lists have one value a draft."""

    temperature: float
    temperatures: tuple[float, ...]
    num_samples: int | None = None
    ece_before: tuple[float, ...] | None = None
    ece_after: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Entries of one drafter, ordered by sampling temperature."""

    entries: tuple[CalibrationEntry, ...]

    @property
    def block_size(self) -> int:
        """Drafted positions that every entry covers."""
        return len(self.entries[0].temperatures)

    def nearest(self, temperature: float) -> CalibrationEntry:
        """The entry a request sampled at ``temperature`` uses; the lower one among equals."""
        return min(self.entries, key=lambda entry: abs(entry.temperature - temperature))

    def distant(self, temperature: float) -> str | None:
        """What to tell once when the nearest entry is far from ``temperature``, else None.

        Greedy acceptance is an argmax match, so greedy and sampled entries are always far apart.
        """
        found = self.nearest(temperature).temperature
        crossed = (found == 0) != (temperature == 0)
        if not crossed and abs(found - temperature) <= DISTANT:
            return None
        return (
            f"requests at temperature {temperature:g} use the calibration fitted at "
            f"temperature {found:g}, the nearest of {[e.temperature for e in self.entries]}"
        )

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Sampling temperatures ``[M]`` and STS temperatures ``[M, G]``, fp32."""
        keys = np.array([entry.temperature for entry in self.entries], np.float32)
        rows = np.array([entry.temperatures for entry in self.entries], np.float32)
        return keys, rows


def identity(block_size: int) -> Calibration:
    """Confidences as the head gives them."""
    return Calibration((CalibrationEntry(0.0, (1.0,) * block_size),))


def load_calibration(path: str | Path, *, block_size: int) -> Calibration:
    """Read a calibration file for a drafter of ``block_size`` positions.

    Raises:
        ValueError: no entry, two entries of one temperature, a list of another length than
            the block size, or an STS temperature that is not above 0.
    """
    data = read_object(path)
    if "entries" in data:
        items = data["entries"]
        if not isinstance(items, list):
            raise ValueError(f"calibration {path}: entries is {items!r}; wanted a list")
        found = [_entry(item, block_size, path) for item in items]
    elif "temperatures" in data:
        found = [_entry({"temperature": 0.0, **data}, block_size, path)]
    else:
        raise ValueError(
            f"calibration {path}: neither entries nor temperatures, found {sorted(data)}"
        )
    entries = sorted(found, key=lambda entry: entry.temperature)
    keys = [entry.temperature for entry in entries]
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(
            f"calibration {path}: entries must have different temperatures, found {keys}"
        )
    return Calibration(tuple(entries))


def save_calibration(
    calibration: Calibration, path: str | Path, *, made_with: dict[str, Any] | None = None
) -> None:
    """Write the file that ``load_calibration`` reads.

    ``made_with`` tells a person where the temperatures come from; nothing reads it.
    """
    entries = [dataclasses.asdict(entry) for entry in calibration.entries]
    content = {} if made_with is None else {"made_with": made_with}
    Path(path).write_text(json.dumps({**content, "entries": entries}, indent=2) + "\n")


def save_sglang(entry: CalibrationEntry, path: str | Path, *, dataset: str) -> None:
    """Write one entry as SGLang's ``--speculative-dspark-confidence-sts-path`` reads it.

    That file has no sampling temperature: its one row serves every request.
    """
    content: dict[str, Any] = {"temperatures": entry.temperatures, "dataset": dataset}
    for name in ("num_samples", "ece_before", "ece_after"):
        if getattr(entry, name) is not None:
            content[name] = getattr(entry, name)
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _entry(item: dict[str, Any], block_size: int, path: str | Path) -> CalibrationEntry:
    if not isinstance(item, dict):
        raise ValueError(f"calibration {path}: an entry is {item!r}; wanted an object")
    for name in ("temperature", "temperatures"):
        if name not in item:
            raise ValueError(f"calibration {path}: an entry lacks {name}, it has {sorted(item)}")
    temperature = _number(item["temperature"], "temperature", path)
    if not (np.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"calibration {path}: temperature is {temperature}, it must be 0 (greedy) or more"
        )
    lists: dict[str, tuple[float, ...] | None] = {}
    for name in ("temperatures", "ece_before", "ece_after"):
        values = item.get(name)
        if values is None:
            lists[name] = None
            continue
        if not isinstance(values, list):
            raise ValueError(f"calibration {path}: {name} is {values!r}; wanted a list of numbers")
        if len(values) != block_size:
            raise ValueError(
                f"calibration {path}: {name} at temperature {temperature:g} has {len(values)} "
                f"values, the drafter's block size is {block_size}"
            )
        lists[name] = tuple(_number(value, name, path) for value in values)
    fitted = lists["temperatures"]
    if fitted is None or not all(np.isfinite(value) and value > 0 for value in fitted):
        raise ValueError(
            f"calibration {path}: temperatures at temperature {temperature:g} must be above 0, "
            f"found {item['temperatures']}"
        )
    return CalibrationEntry(
        temperature, fitted, item.get("num_samples"), lists["ece_before"], lists["ece_after"]
    )


def _number(value: Any, name: str, path: str | Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"calibration {path}: {name} holds {value!r}; wanted a number")
    return float(value)
