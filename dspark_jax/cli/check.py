"""`dspark check`: compare a model with tensors recorded from a reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.drafter_config import dialect_of, is_drafter
from dspark_jax.cli.check_drafter import check_deepspec, check_speculators
from dspark_jax.cli.check_rows import Row
from dspark_jax.cli.check_target import check_folder, check_text_folder
from dspark_jax.json_file import read_object


def check(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    target: Annotated[str | None, tyro.conf.arg(metavar="NAME|DIR|GGUF")] = None,
) -> int:
    """Compare every recorded tensor of a folder with what this library computes, in fp32.

    Args:
        directory: a dense target or a drafter (DeepSpec's or speculators' layout) with
            `golden.safetensors` beside its weights, or recorded text of a real model
            (`text_and_greedy.json`).
        target: the target a drafter borrows from or a text was recorded with; by default the
            one a speculators config names, beside the folder, and SmolLM2-135M for text.

    Returns:
        0 when all agree within tolerance, else 1.
    """
    with jax.default_matmul_precision("highest"):
        rows = compare(directory, target)
    table = Table("tensor", "largest error", "tolerance", "measure", "")
    table.columns[0].no_wrap = True
    for row in rows:
        verdict = "ok" if row.agrees else "[red]DIFFERS[/red]"
        table.add_row(row.name, f"{row.error:.3g}", f"{row.tolerance:.3g}", row.measure, verdict)
    console = Console()
    console.print(table)
    differing = sum(not row.agrees for row in rows)
    console.print(
        f"{directory}: {len(rows) - differing} of {len(rows)} tensors agree", highlight=False
    )
    return 1 if differing else 0


def compare(directory: Path, target: str | None) -> list[Row]:
    """The comparisons of one folder, of whatever kind it is.

    Raises:
        FileNotFoundError: no folder of a known kind.
        ValueError: a model that is not supported or not sound.
    """
    directory = Path(directory)
    if (directory / "text_and_greedy.json").is_file():
        return check_text_folder(directory, target)
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"no config.json and no text_and_greedy.json in {directory}")
    raw = read_object(config_file)
    if not is_drafter(raw):
        if target is not None:
            raise ValueError(
                f"--target is {target} and {directory} holds a target itself; wanted a drafter "
                "or a recorded text there, or no --target"
            )
        return check_folder(directory)
    if dialect_of(raw, directory) == "deepspec":
        return check_deepspec(directory, target)
    return check_speculators(directory, target)
