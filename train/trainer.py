"""The training job: data in, steps, checkpoints, a drafter out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grain
import jax
import jax.numpy as jnp

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.drafter.config import DrafterConfig
from train.cached_data import CachedDataset
from train.checkpointing import Checkpoints
from train.config import TrainConfig
from train.data import TokenDataset, fit_to_length, join, shuffled_batches
from train.feature_cache import FeatureCache
from train.initialize import drafter_config
from train.metrics import MetricsLog
from train.progress import Advance, progress_bar
from train.run_folder import open_run
from train.shards import read_dataset
from train.step import TrainState, initial_state, train_step

DRAFTER = "drafter"


def run_training(config: TrainConfig, target: LoadedTarget, *, resume: bool = False) -> bool:
    """Train until ``config.training.steps`` steps are done, or until SIGTERM.

    The folder ``config.training.output`` receives the run's record, metrics, checkpoints and,
    at the end, ``drafter/``: weights in the run's compute dtype, speculators' layout.

    Returns:
        True when the run is finished; False when SIGTERM stopped it, after saving.

    Raises:
        ValueError: data of another target, a drafter that does not fit, a changed run.
    """
    folder = Path(config.training.output)
    drafter = drafter_config(config.drafter, target)
    data = load_data(config, target.name, drafter)
    open_run(folder, config, data.fingerprint, resume)
    batches = shuffled_batches(
        data,
        batch_size=config.training.batch_size,
        length=config.data.sequence_length,
        seed=config.training.seed,
    )
    checkpoints = Checkpoints(folder / "checkpoints")
    state, done = initial_state(config, drafter), 0
    if resume and checkpoints.latest is not None:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        done = int(state.step)
    log = MetricsLog(folder, done)
    try:
        state, done = _steps(config, drafter, target, state, done, batches, checkpoints, log)
    finally:
        log.close()
        checkpoints.close()
    if done < config.training.steps:
        return False
    dtype = jnp.dtype(config.training.dtype)
    save_drafter(
        drafter,
        jax.tree.map(lambda leaf: leaf.astype(dtype), state.weights),
        folder / DRAFTER,
        (target.config, target.weights),
        target_name=target.name,
    )
    return True


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
    target: LoadedTarget,
    state: TrainState,
    done: int,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    log: MetricsLog,
) -> tuple[TrainState, int]:
    """Run the remaining steps; the device is read only when metrics are written."""
    settings = config.training
    with (
        _termination() as terminated,
        progress_bar("training", settings.steps, done) as advance,
    ):
        while done < settings.steps and not terminated.is_set():
            batch = next(batches)
            state, report = train_step(
                config,
                drafter,
                target.config,
                state,
                target.weights,
                jnp.asarray(batch["tokens"]),
                jnp.asarray(batch["loss_mask"]),
                (jnp.asarray(batch["taps"]), jnp.asarray(batch["last_hidden"]))
                if "taps" in batch
                else None,
            )
            # Written one step late: the device has the next step to work on meanwhile.
            if done % settings.log_every == 0:
                _write(log, done, advance)
            log.add(report)
            done += 1
            advance(1)
            if done % settings.save_every == 0 or done == settings.steps or terminated.is_set():
                _write(log, done, advance)
                checkpoints.save(done, state, batches.get_state())
    return state, done


def _write(log: MetricsLog, step: int, advance: Advance) -> None:
    figures = log.flush(step)
    if figures:
        tau = figures.get("tau_probabilistic", float("nan"))
        advance(note=f"loss {figures['loss']:.3f}  expected length {tau:.2f}")


@contextmanager
def _termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; only the main thread may listen to signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
