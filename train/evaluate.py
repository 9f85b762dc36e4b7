"""Teacher-forced quality of a drafter: expected accepted length, acceptance by position."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Float, Int
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import DrafterWeights
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.weights import DenseWeights
from train.anchors import sample_anchors
from train.config import Dtype
from train.data import TokenDataset, fit_to_length, sequential_batches
from train.features import target_features
from train.forward import (
    Blocks,
    Sequences,
    block_logits,
    draft_blocks,
    frozen_logits,
    map_anchors,
    supervised_first,
)
from train.losses import cross_entropy_and_l1
from train.progress import progress_bar
from train.shards import read_dataset

BATCH = 16
CHUNK = 8


@dataclasses.dataclass(frozen=True)
class Quality:
    """Teacher-forced figures of a drafter on one dataset, at one temperature.

    Attributes:
        temperature: 0 counts greedy matches, above it acceptance is 1 - TV.
        data_temperature: temperature the documents were sampled at.
        expected_length: mean over blocks of 1 + the sum of running products of acceptance.
        conditional_acceptance: by position, among blocks accepted up to it.
        acceptance: by position, mean over all supervised slots.
        blocks: number of blocks counted.
    """

    temperature: float
    data_temperature: float
    expected_length: float
    conditional_acceptance: tuple[float, ...]
    acceptance: tuple[float, ...]
    blocks: int


def evaluate(
    drafter: LoadedDrafter,
    target: LoadedTarget,
    dataset: TokenDataset,
    *,
    temperature: float,
    length: int,
    num_anchors: int = 64,
    seed: int = 0,
) -> Quality:
    """Measure on up to ``num_anchors`` blocks of each document's first ``length`` tokens.

    Previous tokens are the document's own, as in training, so no decoding runs.

    Raises:
        ValueError: documents of another target; a negative temperature.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; wanted 0 (greedy) or more")
    if dataset.manifest["target"] != target.name:
        raise ValueError(
            f"the documents were written by target {dataset.manifest['target']!r}, "
            f"the drafter is measured on {target.name!r}"
        )
    fitted = fit_to_length(dataset, length, 2)
    sums = np.zeros((4, drafter.config.block_size))
    key = jax.random.key(seed)
    batches = sequential_batches(fitted, batch_size=BATCH, length=length)
    with progress_bar("evaluating", math.ceil(len(fitted) / BATCH)) as advance:
        for number, batch in enumerate(batches):
            sums += jax.device_get(
                _acceptance_sums(
                    drafter.config,
                    target.config,
                    temperature,
                    num_anchors,
                    drafter.weights,
                    target.weights,
                    jnp.asarray(batch["tokens"]),
                    jnp.asarray(batch["loss_mask"]),
                    jax.random.fold_in(key, number),
                )
            )
            advance(1)
    accepted, slots, survived, reached = sums
    return Quality(
        temperature=temperature,
        data_temperature=float(dataset.manifest["temperature"]),
        expected_length=float(1 + survived.sum() / slots[0]),
        conditional_acceptance=tuple((survived / np.maximum(reached, 1e-9)).tolist()),
        acceptance=tuple((accepted / np.maximum(slots, 1)).tolist()),
        blocks=int(slots[0]),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _acceptance_sums(
    config: DrafterConfig,
    target: DenseConfig,
    temperature: float,
    num_anchors: int,
    weights: DrafterWeights,
    target_weights: DenseWeights,
    tokens: Int[Array, "B K"],
    loss_mask: Bool[Array, "B K"],
    key: Array,
) -> Float[Array, "4 G"]:
    """By position: acceptance, slots, survival, and survival of the slots before (supervised)."""
    taps, last_hidden = target_features(target, target_weights, tokens, config.target_layer_ids)
    batch = Sequences(tokens=tokens, loss_mask=loss_mask, taps=taps, last_hidden=last_hidden)
    anchors, keep = sample_anchors(key, loss_mask, num_anchors)
    blocks = draft_blocks(config, weights, target_weights.embed, batch, anchors, keep)
    blocks = supervised_first(blocks)
    head = target_weights.head

    def accept(part: Blocks) -> Float[Array, "1 a G"]:
        draft, _ = block_logits(config, weights, head, part)
        truth = frozen_logits(part.target_hidden.astype(head.dtype), head)
        if temperature == 0:
            return (jnp.argmax(draft, axis=-1) == jnp.argmax(truth, axis=-1)).astype(jnp.float32)
        _, l1 = cross_entropy_and_l1(draft / temperature, truth / temperature, part.target_ids)
        return 1 - 0.5 * l1

    acceptance = map_anchors(accept, blocks, BATCH * math.gcd(CHUNK, num_anchors)) * blocks.mask
    survival = jnp.cumprod(acceptance, axis=-1)
    before = jnp.concatenate([jnp.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
    figures = (acceptance, blocks.mask, survival, before * blocks.mask)
    return jnp.stack([jnp.sum(figure, axis=(0, 1), dtype=jnp.float32) for figure in figures])


def evaluate_folders(
    drafter: LoadedDrafter,
    target: LoadedTarget,
    folders: tuple[Path, ...],
    *,
    temperature: float,
    length: int,
    num_anchors: int = 64,
) -> dict[str, Any]:
    """``evaluate`` on each folder, keyed by its name, and the macro average of their lengths.

    Raises:
        ValueError: folders sampled at different temperatures or through different templates:
            their figures do not belong in one average.
    """
    datasets = {folder.name: read_dataset(folder) for folder in folders}
    for key in ("temperature", "template_sha256"):
        found = {name: data.manifest[key] for name, data in datasets.items()}
        if len(set(found.values())) > 1:
            raise ValueError(f"the folders differ in {key}: {found}")
    sets = {
        name: dataclasses.asdict(
            evaluate(
                drafter,
                target,
                data,
                temperature=temperature,
                length=length,
                num_anchors=num_anchors,
            )
        )
        for name, data in datasets.items()
    }
    macro = float(np.mean([quality["expected_length"] for quality in sets.values()]))
    return {
        "drafter": drafter.name,
        "target": target.name,
        "temperature": temperature,
        "macro_expected_length": macro,
        "sets": sets,
    }


def main(
    data: tyro.conf.Positional[tuple[Path, ...]],
    *,
    target: str,
    drafter: str,
    temperature: float = 1.0,
    length: int = 768,
    num_anchors: int = 64,
    dtype: Dtype = "bfloat16",
    json_path: Path | None = None,
) -> None:
    """Teacher-forced quality of a drafter on data folders.

    Args:
        data: folders of documents that the target wrote.
        target: name, folder or GGUF file.
        drafter: folder, or name of a shipped drafter.
        temperature: 0 counts greedy matches, above it acceptance is 1 - TV.
        length: tokens of each document that are used.
        num_anchors: blocks a document at most.
        dtype: of the weights.
        json_path: where to write the figures.
    """
    loaded = load_target(target, jnp.dtype(dtype))
    pair = load_drafter(drafter, (loaded.config, loaded.weights), jnp.dtype(dtype))
    report = evaluate_folders(
        pair, loaded, data, temperature=temperature, length=length, num_anchors=num_anchors
    )
    table = Table("set", "blocks", "expected length", "conditional acceptance")
    for name, quality in report["sets"].items():
        by_position = " ".join(f"{value:.2f}" for value in quality["conditional_acceptance"])
        length_text = f"{quality['expected_length']:.2f}"
        table.add_row(name, str(quality["blocks"]), length_text, by_position)
    table.add_row("macro", "", f"{report['macro_expected_length']:.2f}", "")
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
