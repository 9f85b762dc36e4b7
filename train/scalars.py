"""Figures of a job over time, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


def write_scalars(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    """Write ``figures`` as those of ``step`` into ``folder``/tensorboard."""
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
    for name, value in figures.items():
        writer.add_scalar(name, value, step)
    writer.close()
