"""The training job: data in, steps, checkpoints, a drafter out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.weights import DenseWeights
from train.cached_data import CachedDataset
from train.checkpointing import Checkpoints
from train.config import TrainConfig
from train.data import TokenDataset, fit_to_length, join, shuffled_batches
from train.feature_cache import FeatureCache
from train.initialize import drafter_config
from train.mesh import (
    DATA,
    batch_sharding,
    place_batch,
    rules_of,
    training_mesh,
    weight_shardings,
    whole,
)
from train.metrics import MetricsLog
from train.progress import Advance, progress_bar
from train.run_folder import open_run
from train.shards import read_dataset
from train.start import existing_weights
from train.step import TrainState, compiled_part, initial_state, train_step
from train.stopping import Stop

DRAFTER = "drafter"


def check_trainable(target: LoadedTarget) -> None:
    """Refuse a target whose layers training cannot run over whole sequences.

    Raises:
        ValueError: names the kind of target.
    """
    if not isinstance(target.config, DenseConfig):
        raise ValueError(
            f"{target.name} has a {type(target.config).__name__}: it decodes and cannot be trained "
            "for yet; wanted a dense target (Llama family, Qwen3)"
        )


def run_training(
    config: TrainConfig, target: LoadedTarget, *, resume: bool = False, stop: Stop | None = None
) -> bool:
    """Train until ``config.training.steps`` steps are done, or until SIGTERM or Ctrl-C.

    The folder ``config.training.output`` receives the run's record, metrics, checkpoints and,
    at the end, ``drafter/``: weights in the run's compute dtype, speculators' layout.

    Returns:
        True when the run is finished; False when a signal stopped it, after saving. ``stop``
        then knows which.

    Raises:
        ValueError: a target that only decodes, data of another target, a drafter that does not
            fit, a changed run.
    """
    check_trainable(target)
    folder = Path(config.training.output)
    mesh = _check_mesh(config)
    drafter = drafter_config(config.drafter, target)
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
    state, done = initial_state(config, drafter, existing), 0
    if resume and checkpoints.latest is not None:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        done = int(state.step)
    placed = jax.device_put(
        target.weights,
        weight_shardings(mesh, rules_of(config.mesh), target.weights, target.config.vocab_size),
    )
    log = MetricsLog(folder, done) if leads() else None
    try:
        state, done = _steps(
            config,
            drafter,
            target.config,
            placed,
            state,
            done,
            batches,
            checkpoints,
            log,
            stop or Stop(),
        )
    finally:
        if log is not None:
            log.close()
        checkpoints.close()
    if done < config.training.steps:
        return False
    dtype = jnp.dtype(config.training.dtype)
    weights = whole(mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), state.weights))
    if leads():
        save_drafter(
            drafter,
            jax.device_get(weights),
            folder / DRAFTER,
            (target.config, target.weights),
            target_name=target.name,
        )
    return True


def leads() -> bool:
    """Whether this process writes what a run leaves behind; the others only compute."""
    return jax.process_index() == 0


def _check_mesh(config: TrainConfig) -> Mesh:
    """The run's mesh, if the batch divides over it."""
    mesh = training_mesh(config.mesh)
    if config.training.batch_size % mesh.shape[DATA]:
        raise ValueError(
            f"training.batch_size {config.training.batch_size} does not divide over the "
            f"{mesh.shape[DATA]} devices of the data axis"
        )
    return mesh


def load_data(
    config: TrainConfig, target_name: str, drafter: DrafterConfig
) -> TokenDataset | CachedDataset:
    """The run's documents, cut to length, with enough to learn from.

    As in DeepSpec, a document with fewer supervised tokens than two blocks is dropped.

    Raises:
        ValueError: data or features of another target or of other layers.
    """
    length, minimum = config.data.sequence_length, 2 * config.drafter.block_size
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


def _steps(
    config: TrainConfig,
    drafter: DrafterConfig,
    target: DenseConfig,
    target_weights: DenseWeights,
    state: TrainState,
    done: int,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    log: MetricsLog | None,
    stop: Stop,
) -> tuple[TrainState, int]:
    """Run the remaining steps; the device is read only when metrics are written."""
    settings, program = config.training, compiled_part(config)
    place = functools.partial(
        place_batch, sharding=batch_sharding(training_mesh(config.mesh), rules_of(config.mesh))
    )
    with (
        _stopping(stop) as stopped,
        progress_bar("training", settings.steps, done, shown=leads()) as advance,
    ):
        ending = stopped(done)
        while done < settings.steps and not ending:
            batch = {name: place(array) for name, array in next(batches).items()}
            cached = (batch["taps"], batch["last_hidden"]) if "taps" in batch else None
            state, report = train_step(
                program,
                drafter,
                target,
                state,
                target_weights,
                batch["tokens"],
                batch["loss_mask"],
                cached,
            )
            # Written one step late: the device has the next step to work on meanwhile.
            if done % settings.log_every == 0:
                _write(log, done, advance)
            if log is not None:
                log.add(report)
            done += 1
            advance(1)
            ending = stopped(done)
            if done % settings.save_every == 0 or done == settings.steps or ending:
                _write(log, done, advance)
                checkpoints.save(done, state, batches.get_state())
    return state, done


def _write(log: MetricsLog | None, step: int, advance: Advance) -> None:
    figures = None if log is None else log.flush(step)
    if figures:
        tau = figures.get("tau_probabilistic", float("nan"))
        advance(note=f"loss {figures['loss']:.3f}  expected length {tau:.2f}")


@contextmanager
def _stopping(stop: Stop) -> Iterator[Callable[[int], bool]]:
    """Whether the run is to end, asked after each step; several processes agree on the step."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    with stop:
        yield lambda step: stop.pending
