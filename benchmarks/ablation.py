"""One factor at a time: what head, depth and block size are worth to a drafter.

Every variant differs from the config's drafter in what its name says and in nothing else: the
same documents in the same order, steps, optimizer and seed. Each is then measured teacher-forced
on held-out documents, every folder at the temperature it was sampled at (0: greedy matches,
above it 1 - TV). Two variants of one block size compare directly; a longer block has more to win.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.record import Record
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import load_target
from train.config import TrainConfig, read_config
from train.shards import read_dataset
from train.teacher_forced import teacher_forced
from train.trainer import DRAFTER, run_training

NO_HEAD = {"markov_rank": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-head": NO_HEAD,
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "layers-1": {"num_hidden_layers": 1},
    "layers-2": {"num_hidden_layers": 2},
    "layers-5": {"num_hidden_layers": 5},
    "layers-5-no-head": {"num_hidden_layers": 5, **NO_HEAD},
    "block-4": {"block_size": 4},
    "block-4-no-head": {"block_size": 4, **NO_HEAD},
    "block-11": {"block_size": 11},
    "block-11-no-head": {"block_size": 11, **NO_HEAD},
    "block-15": {"block_size": 15},
    "block-15-no-head": {"block_size": 15, **NO_HEAD},
}


def main(
    config: Path,
    held_out: tuple[Path, ...],
    output: Annotated[Path, tyro.conf.arg(name="json")],
    *,
    runs: Path,
    steps: int = 500,
    variants: tuple[str, ...] = tuple(VARIANTS),
) -> int:
    """Train and measure the variants.

    Args:
        config: TOML of the training run that the variants start from.
        held_out: data folders that no variant is trained on.
        output: JSON of everything measured.
        runs: folder that receives a run folder for each variant.
        steps: training steps of each.
        variants: what to run.
    """
    if unknown := sorted(set(variants) - set(VARIANTS)):
        print(f"variants {unknown} are unknown; known: {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    base = read_config(config, TrainConfig)
    target = load_target(base.target.name, jnp.dtype(base.target.dtype))
    documents = {folder.name: read_dataset(folder) for folder in held_out}
    record = Record(output, config=dataclasses.asdict(base), steps=steps)
    for name in variants:
        with record.arm(variant=name, **VARIANTS[name]) as arm:
            variant = vary(base, name, steps, runs / name)
            begin = time.perf_counter()
            run_training(variant, target)
            arm["train_seconds"] = round(time.perf_counter() - begin, 1)
            drafter = load_drafter(
                runs / name / DRAFTER,
                (target.config, target.weights),
                jnp.dtype(base.target.dtype),
                stop_token_ids=target.stop_token_ids,
            )
            arm["held_out"] = {
                folder: dataclasses.asdict(
                    teacher_forced(
                        drafter,
                        target,
                        data,
                        temperature=float(data.manifest["temperature"]),
                        length=base.data.sequence_length,
                        num_anchors=min(64, base.data.sequence_length - 1),
                    )
                )
                for folder, data in documents.items()
            }
    Console().print(table(record.arms))
    return record.finish()


def vary(base: TrainConfig, name: str, steps: int, folder: Path) -> TrainConfig:
    """The base run with one factor changed, its own folder, and one save at the end.

    Raises:
        ValueError: a run of another kind of drafter.
    """
    training = dataclasses.replace(
        base.training, output=str(folder), steps=steps, save_every=steps, log_every=steps
    )
    drafter = base.drafter
    if drafter is None:
        raise ValueError("the variants are of a dense drafter: describe one in [drafter]")
    if not VARIANTS[name].get("markov_rank", 1):
        drafter = dataclasses.replace(drafter, markov_head_type="vanilla")
    drafter = dataclasses.replace(drafter, **VARIANTS[name])
    return dataclasses.replace(base, training=training, drafter=drafter)


def table(arms: list[dict[str, Any]]) -> Table:
    """Expected accepted length of every variant on every folder."""
    measured = [arm for arm in arms if "held_out" in arm]
    folders = list(measured[0]["held_out"]) if measured else []
    rows = Table("variant", *folders, "train s", title="expected accepted length, teacher-forced")
    for arm in measured:
        figures = [f"{arm['held_out'][folder]['expected_length']:.3f}" for folder in folders]
        rows.add_row(arm["variant"], *figures, f"{arm['train_seconds']:.0f}")
    return rows


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
