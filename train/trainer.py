"""The training job: data in, steps, checkpoints, a drafter out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from train.cached_data import CachedDataset
from train.checkpointing import Checkpoints
from train.config import TrainConfig
from train.data import TokenDataset, fit_to_length, join, shuffled_batches
from train.drafters import described_drafter, family_of
from train.feature_cache import FeatureCache
from train.loop import check_batch, leads, newest, run_steps
from train.mesh import rules_of, training_mesh, weight_shardings, whole
from train.metrics import MetricsLog
from train.run_folder import open_run
from train.shards import read_dataset
from train.start import existing_weights
from train.step import StepReport, TrainState, compiled_part, initial_state, train_step
from train.stopping import Stop

DRAFTER = "drafter"


def run_training(
    config: TrainConfig, target: LoadedTarget, *, resume: bool = False, stop: Stop | None = None
) -> bool:
    """Train until ``config.training.steps`` steps are done, or until SIGTERM or Ctrl-C.

    The folder ``config.training.output`` receives the run's record, metrics, checkpoints and,
    at the end, ``drafter/``: weights in the run's compute dtype, in speculators' layout, or
    DeepSeek's for DeepSeek-V4's own drafter.

    Returns:
        True when the run is finished; False when a signal stopped it, after saving. ``stop``
        then knows which.

    Raises:
        ValueError: data of another target, a drafter that does not fit, a changed run.
    """
    folder = Path(config.training.output)
    mesh, rules = training_mesh(config.mesh), rules_of(config.mesh)
    check_batch(config.training.batch_size, mesh)
    drafter = described_drafter(config, target)
    data = load_data(config, target.name, drafter)
    source = config.training.start_from
    existing = None if source is None else existing_weights(source, drafter, target)
    if leads():
        open_run(folder, config, data.fingerprint, resume)
    batches = shuffled_batches(
        data,
        batch_size=config.training.batch_size,
        length=config.data.sequence_length,
        seed=config.training.seed,
    )
    checkpoints = Checkpoints(folder / "checkpoints")
    state = initial_state(config, drafter, existing)
    state, done = newest(checkpoints, state, batches, resume)
    placed = jax.device_put(
        target.weights, weight_shardings(mesh, rules, target.weights, target.config.vocab_size)
    )
    program = compiled_part(config)

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, StepReport]:
        cached = (batch["taps"], batch["last_hidden"]) if "taps" in batch else None
        return train_step(
            program,
            drafter,
            target.config,
            state,
            placed,
            batch["tokens"],
            batch["loss_mask"],
            cached,
        )

    log = MetricsLog(folder, done) if leads() else None
    try:
        state, done = run_steps(
            step,
            state,
            done,
            batches,
            checkpoints,
            log,
            settings=config.training,
            mesh=mesh,
            rules=rules,
            stop=stop or Stop(),
            note=_note,
        )
    finally:
        if log is not None:
            log.close()
        checkpoints.close()
    if done < config.training.steps:
        return False
    dtype = jnp.dtype(config.training.dtype)
    weights = whole(mesh, family_of(drafter).served(state.weights, dtype))
    if leads():
        save_drafter(
            drafter,
            jax.device_get(weights),
            folder / DRAFTER,
            (target.config, target.weights),
            target_name=target.name,
        )
    return True


def _note(figures: dict[str, float]) -> str:
    tau = figures.get("tau_probabilistic", float("nan"))
    return f"loss {figures['loss']:.3f}  expected length {tau:.2f}"


def load_data(config: TrainConfig, target_name: str, drafter: Any) -> TokenDataset | CachedDataset:
    """The run's documents, cut to length, with enough to learn from.

    As in DeepSpec, a document with fewer supervised tokens than two blocks is dropped.

    Raises:
        ValueError: data or features of another target or of other layers.
    """
    length, minimum = config.data.sequence_length, 2 * drafter.block_size
    if config.data.cache is not None:
        cache = FeatureCache(Path(config.data.cache))
        cache.check_fits(target_name, drafter.target_hidden_size, drafter.target_layer_ids)
        return CachedDataset(cache, length, minimum)
    dataset = join([read_dataset(Path(folder)) for folder in config.data.folders])
    if dataset.manifest["target"] != target_name:
        raise ValueError(
            f"the data in {config.data.folders[0]} was written by target "
            f"{dataset.manifest['target']!r}, the run trains for {target_name!r}"
        )
    return fit_to_length(dataset, length, minimum)
