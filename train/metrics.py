"""Metrics of a run: summed on the way, divided when written, to TensorBoard and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from tensorboardX import SummaryWriter

from train.step import StepReport

LINES = "metrics.jsonl"


class MetricsLog:
    """Collects step reports without reading them; ``flush`` reads and writes what is due.

    Ratios are summed over the steps of a flush and then divided (DeepSpec's rule), scalars
    are averaged, the learning rate is the last step's.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Write into ``folder``; what it holds of ``first_step`` or later is superseded."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LINES
        self._reports: list[StepReport] = []
        kept = []
        if self._path.exists():
            lines = self._path.read_text().splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        self._path.write_text("".join(line + "\n" for line in kept))
        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None
        )

    def add(self, report: StepReport) -> None:
        """Keep a report; nothing is read from the device."""
        self._reports.append(report)

    @property
    def pending(self) -> int:
        """Reports not yet written."""
        return len(self._reports)

    def flush(self, step: int) -> dict[str, float] | None:
        """Write the figures of all pending reports as those of ``step``; None if there are none."""
        if not self._reports:
            return None
        reports = jax.device_get(self._reports)
        self._reports = []
        figures = {
            "loss": sum(float(report.terms.loss) for report in reports) / len(reports),
            "gradient_norm": sum(float(r.gradient_norm) for r in reports) / len(reports),
            "learning_rate": float(reports[-1].learning_rate),
        }
        for name in reports[0].terms.metrics:
            ratios = [report.terms.metrics[name] for report in reports]
            denominator = sum(float(ratio.denominator) for ratio in ratios)
            if denominator > 0:
                figures[name] = sum(float(ratio.numerator) for ratio in ratios) / denominator
        with self._path.open("a") as lines:
            lines.write(json.dumps({"step": step, **figures}) + "\n")
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        return figures

    def close(self) -> None:
        """Finish the TensorBoard file."""
        self._writer.close()
