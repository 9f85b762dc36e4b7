"""The calibration job: records in, STS temperatures, figures on held-out prompts, diagrams out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_jax.calibration.blocks import MINIMUM_REACHED, VerifiedBlocks
from dspark_jax.calibration.file import (
    Calibration,
    CalibrationEntry,
    save_calibration,
    save_sglang,
)
from dspark_jax.calibration.gradient import fit_gradient
from dspark_jax.calibration.online import fit_online
from dspark_jax.calibration.plots import draw_reliability
from dspark_jax.calibration.quality import PositionQuality, measure
from dspark_jax.calibration.records import (
    AnswerRecord,
    Records,
    check_fittable,
    check_same_source,
    read_records,
    split_by_prompt,
    stack_blocks,
    without_repeats,
)
from dspark_jax.calibration.sts import Fit, fit_grid
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from train.calibrate_config import CalibrateConfig, FitSection
from train.collect import Collector
from train.run_folder import open_run
from train.stopping import Stop

CALIBRATION = "calibration.json"
SGLANG = "calibration-sglang.json"
REPORT = "report.json"

TEST_BLOCKS = 50_000
"""Test blocks from which figures are worth quoting to a tenth of a percent."""


@dataclasses.dataclass(frozen=True)
class TemperatureReport:
    """What was fitted at one sampling temperature, and how it does on the test prompts.

    ``shrunk`` names positions (from 1) that keep STS temperature 1 for want of data. The means
    are over positions with a label.
    """

    temperature: float
    fit_prompts: int
    test_prompts: int
    fit_blocks: int
    test_blocks: int
    sts: tuple[float, ...]
    shrunk: tuple[int, ...]
    mean_ece_before: float | None
    mean_ece_after: float | None
    positions: tuple[PositionQuality, ...]
    notes: tuple[str, ...]


def run_calibration(
    config: CalibrateConfig,
    target: LoadedTarget | None = None,
    drafter: LoadedDrafter | None = None,
    *,
    resume: bool = False,
    stop: Stop | None = None,
) -> tuple[TemperatureReport, ...]:
    """Collect or read records, fit every temperature, and write the run's folder.

    The folder receives the run's record, the confidence records, ``calibration.json``,
    ``calibration-sglang.json`` if asked for, ``report.json`` and one diagram a temperature.

    Args:
        target: needed with ``collect``.
        drafter: needed with ``collect``.
        resume: go on in the folder of an earlier attempt.
        stop: entered by the caller; a signal then ends the collection between two answers.

    Raises:
        ValueError: records that a fit cannot use, each named with the value found and wanted.
        FileExistsError: a run in the folder without ``resume``; FileNotFoundError: none with it.
        Stopped: a signal came; every answer that had ended is kept.
    """
    folder = Path(config.output.folder)
    if config.collect is not None:
        assert target is not None
        assert drafter is not None
        collector = Collector(config.collect, target, drafter)
        open_run(folder, config, collector.fingerprint(), resume)
        if collector.left_out:
            print(f"{collector.left_out} prompts leave no room for an answer and are left out")
        records = [
            collector.records(folder, temperature, stop or Stop())
            for temperature in config.fit.temperatures
        ]
        groups = dict(zip(config.fit.temperatures, records, strict=True))
        dataset = ", ".join(config.collect.prompts)
    else:
        assert config.records is not None
        groups = read_files(config)
        open_run(folder, config, _digests(config.records.files), resume)
        dataset = ", ".join(config.records.files)
    reports = []
    for temperature, group in sorted(groups.items()):
        print(f"fitting at temperature {temperature:g}")
        reports.append(_fit_temperature(config.fit, folder, group, dataset))
    _write(config, folder, groups, reports, dataset)
    return tuple(reports)


def read_files(config: CalibrateConfig) -> dict[float, Records]:
    """Records of the config's files by sampling temperature, all of one source.

    Raises:
        ValueError: records of another target, drafter, template or temperature, trimmed or
            calibrated ones, or a temperature without records.
    """
    assert config.records is not None
    files = {path: read_records(Path(path)) for path in dict.fromkeys(config.records.files)}
    first = next(iter(files.values())).source
    wanted = dataclasses.replace(
        first, target=config.target.name, drafter=Path(config.drafter.name).name
    )
    groups: dict[float, Records] = {}
    for path, records in files.items():
        source = records.source
        check_fittable(source, path)
        if source.temperature not in config.fit.temperatures:
            raise ValueError(
                f"{path}: temperature is {source.temperature}, wanted one of "
                f"{list(config.fit.temperatures)} (fit.temperatures)"
            )
        expected = dataclasses.replace(wanted, temperature=source.temperature)
        check_same_source(source, expected, path)
        earlier = groups[source.temperature].answers if source.temperature in groups else ()
        groups[source.temperature] = Records(source, (*earlier, *records.answers))
    missing = [one for one in config.fit.temperatures if one not in groups]
    if missing:
        raise ValueError(
            f"no records at temperature {missing[0]:g}; the files have {sorted(groups)}"
        )
    return groups


def fit_temperatures(blocks: VerifiedBlocks, method: FitSection) -> Fit:
    """STS temperatures by the method of a config."""
    if method.method == "grid":
        return fit_grid(blocks)
    if method.method == "gradient":
        return fit_gradient(blocks, loss=method.loss)
    return fit_online(blocks)


def _fit_temperature(
    settings: FitSection, folder: Path, records: Records, dataset: str
) -> TemperatureReport:
    """Fit on one half of the prompts, measure and draw on the other."""
    source = records.source
    answers = without_repeats(records.answers)
    fit_side, test_side = split_by_prompt(
        answers, test_fraction=settings.test_fraction, seed=settings.seed
    )
    fit_blocks, test_blocks = (
        stack_blocks(side, source.block_size) for side in (fit_side, test_side)
    )
    fitted = fit_temperatures(fit_blocks, settings)
    quality = measure(test_blocks, fitted.temperatures)
    draw_reliability(
        test_blocks,
        fitted.temperatures,
        quality,
        folder / f"reliability-T{source.temperature:g}.png",
        f"{source.drafter} for {source.target}, temperature {source.temperature:g}, "
        f"{len(test_blocks):,} test blocks",
    )
    shrunk = tuple(int(position) + 1 for position in np.flatnonzero(fitted.shrunk))
    return TemperatureReport(
        temperature=source.temperature,
        fit_prompts=_prompt_count(fit_side),
        test_prompts=_prompt_count(test_side),
        fit_blocks=len(fit_blocks),
        test_blocks=len(test_blocks),
        sts=tuple(fitted.temperatures.tolist()),
        shrunk=shrunk,
        mean_ece_before=_mean(one.ece_before for one in quality),
        mean_ece_after=_mean(one.ece_after for one in quality),
        positions=quality,
        notes=tuple(_notes(len(records.answers) - len(answers), fit_blocks, test_blocks, shrunk)),
    )


def _notes(
    repeats: int, fit_blocks: VerifiedBlocks, test_blocks: VerifiedBlocks, shrunk: Sequence[int]
) -> Iterable[str]:
    """What a reader of the figures must know."""
    if repeats:
        yield f"{repeats} answers occur more than once in the records and count once"
    if shrunk:
        reached = fit_blocks.reached.sum(axis=0)
        counts = ", ".join(f"{reached[position - 1]:,}" for position in shrunk)
        yield (
            f"too little data: positions {', '.join(map(str, shrunk))} are reached by {counts} "
            f"blocks and keep STS temperature 1; {MINIMUM_REACHED} are wanted"
        )
    if len(test_blocks) < TEST_BLOCKS:
        yield (
            f"{len(test_blocks):,} test blocks are too few for figures to a tenth of a percent; "
            f"{TEST_BLOCKS:,} are wanted"
        )


def _write(
    config: CalibrateConfig,
    folder: Path,
    groups: dict[float, Records],
    reports: Sequence[TemperatureReport],
    dataset: str,
) -> None:
    entries = {report.temperature: _entry(report) for report in reports}
    source = next(iter(groups.values())).source
    made_with = {
        "target": source.target,
        "drafter": source.drafter,
        "drafter_sha256": source.drafter_sha256,
        "template_sha256": source.template_sha256,
        "top_k": source.top_k,
        "top_p": source.top_p,
        "dataset": dataset,
        "method": config.fit.method,
    }
    save_calibration(
        Calibration(tuple(entries.values())), folder / CALIBRATION, made_with=made_with
    )
    if config.output.sglang_temperature is not None:
        entry = entries[config.output.sglang_temperature]
        save_sglang(entry, folder / SGLANG, dataset=dataset)
    report = {
        "made_with": made_with,
        "fit": dataclasses.asdict(config.fit),
        "temperatures": [dataclasses.asdict(one) for one in reports],
    }
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")


def _entry(report: TemperatureReport) -> CalibrationEntry:
    def every(name: str) -> tuple[float, ...] | None:
        values = tuple(getattr(one, name) for one in report.positions)
        return None if None in values else values

    return CalibrationEntry(
        temperature=report.temperature,
        temperatures=report.sts,
        num_samples=report.fit_blocks,
        ece_before=every("ece_before"),
        ece_after=every("ece_after"),
    )


def _prompt_count(answers: Sequence[AnswerRecord]) -> int:
    return len({answer.prompt for answer in answers})


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _digests(files: Sequence[str]) -> dict[str, Any]:
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}


def print_reports(reports: Sequence[TemperatureReport]) -> None:
    """A table a temperature, and what must be known with it.

    ECE, AUROC and Brier are those of the cumulative product; "its own" is the AUROC of the
    position's own confidence among blocks that reach it.
    """
    console = Console()
    for report in reports:
        table = Table(
            "draft",
            "blocks",
            "STS",
            "ECE %",
            "AUROC",
            "its own",
            "Brier",
            title=f"temperature {report.temperature:g}, test prompts, before → after STS",
            box=None,
        )
        for one in report.positions:
            table.add_row(
                str(one.position),
                f"{one.blocks:,}",
                f"{one.temperature:.2f}",
                _change(one.ece_before, one.ece_after, 100, 2),
                _change(one.auroc_before, one.auroc_after, 1, 3),
                _cell(one.conditional_auroc_after, 1, 3),
                _change(one.brier_before, one.brier_after, 1, 3),
            )
        console.print(table)
        means = _change(report.mean_ece_before, report.mean_ece_after, 100, 2)
        console.print(f"mean ECE {means} %")
        for note in report.notes:
            console.print(note)


def _change(before: float | None, after: float | None, scale: int, digits: int) -> str:
    return f"{_cell(before, scale, digits)} → {_cell(after, scale, digits)}"


def _cell(value: float | None, scale: int, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"
