"""What a calibration job is asked for: records or prompts, temperatures, a method."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from train.config import TargetSection


@dataclasses.dataclass(frozen=True)
class PairedDrafter:
    """The drafter whose confidences are calibrated: a folder, a shipped name or a hub id."""

    name: str


@dataclasses.dataclass(frozen=True)
class CollectSection:
    """Which answers are decoded to verify drafts.

    ``prompts`` are JSON Lines files with ``turns``, of which the first is asked. ``max_context``
    bounds prompt and answer together in tokens; a prompt that leaves no room for
    ``max_new_tokens`` is left out. ``thinking`` is the thinking mode of models that have one;
    left out, it is the template's own default.
    """

    prompts: tuple[str, ...]
    max_new_tokens: int
    max_context: int
    samples_per_prompt: int = 1
    top_k: int = 0
    top_p: float = 1.0
    thinking: bool | None = None
    seed: int = 42
    batch: int = 256


@dataclasses.dataclass(frozen=True)
class RecordsSection:
    """Files of confidence records made earlier."""

    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FitSection:
    """How temperatures are fitted, one row for each sampling temperature (0 = greedy).

    ``loss`` is that of method "gradient". ``test_fraction`` of the prompts are kept from the fit.
    """

    temperatures: tuple[float, ...]
    method: Literal["grid", "gradient", "online"] = "grid"
    loss: Literal["nll", "brier"] = "nll"
    test_fraction: float = 0.5
    seed: int = 42


@dataclasses.dataclass(frozen=True)
class OutputSection:
    """The folder of the run, and the temperature whose row is written in SGLang's shape too."""

    folder: str
    sglang_temperature: float | None = None


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """One calibration run, from prompts or from records: exactly one of the two."""

    target: TargetSection
    drafter: PairedDrafter
    fit: FitSection
    output: OutputSection
    collect: CollectSection | None = None
    records: RecordsSection | None = None

    def __post_init__(self) -> None:
        """Refuse none or both sources of records, and numbers out of range."""
        if (self.collect is None) == (self.records is None):
            raise ValueError("give one of the sections collect and records")
        if self.records is not None and not self.records.files:
            raise ValueError("records.files is empty; wanted at least one file")
        temperatures = self.fit.temperatures
        if not temperatures or len(set(temperatures)) < len(temperatures):
            raise ValueError(
                f"fit.temperatures are {list(temperatures)}; wanted one or more, all different"
            )
        for temperature in temperatures:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(f"fit.temperatures holds {temperature}; wanted 0 (greedy) or more")
        if not 0 < self.fit.test_fraction < 1:
            raise ValueError(
                f"fit.test_fraction is {self.fit.test_fraction}; wanted above 0, below 1"
            )
        wanted = self.output.sglang_temperature
        if wanted is not None and wanted not in temperatures:
            raise ValueError(
                f"output.sglang_temperature is {wanted}; wanted one of {list(temperatures)}, "
                "the fitted temperatures"
            )
        if self.collect is not None:
            _check_collect(self.collect)


def _check_collect(collect: CollectSection) -> None:
    if not collect.prompts:
        raise ValueError("collect.prompts is empty; wanted at least one file")
    for name in ("max_new_tokens", "max_context", "samples_per_prompt", "batch"):
        value = getattr(collect, name)
        if value < 1:
            raise ValueError(f"collect.{name} is {value}; it must be at least 1")
    for name in ("seed", "top_k"):
        value = getattr(collect, name)
        if value < 0:
            raise ValueError(f"collect.{name} is {value}; it must be at least 0")
    if not 0 < collect.top_p <= 1:
        raise ValueError(f"collect.top_p is {collect.top_p}; wanted above 0, at most 1 (off)")
    if collect.max_new_tokens >= collect.max_context:
        raise ValueError(
            f"collect.max_new_tokens {collect.max_new_tokens} must be below "
            f"collect.max_context {collect.max_context}"
        )
