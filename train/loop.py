"""The loop of a training job: steps until the last one or a signal, state kept on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grain
import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.checkpointing import Checkpoints
from train.mesh import DATA, ShardingRules, batch_sharding, place_batch
from train.metrics import MetricsLog
from train.progress import Advance, progress_bar
from train.stopping import Stop

Step = Callable[[Any, dict[str, jax.Array]], tuple[Any, Any]]
"""A state and a batch to the next state and its report."""
Note = Callable[[dict[str, float]], str]
"""Figures to what the progress bar says of them."""


def leads() -> bool:
    """Whether this process writes what a run leaves behind; the others only compute."""
    return jax.process_index() == 0


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Refuse a batch that does not divide over the devices of ``mesh``.

    Raises:
        ValueError: names both.
    """
    if batch_size % mesh.shape[DATA]:
        raise ValueError(
            f"training.batch_size {batch_size} does not divide over the {mesh.shape[DATA]} "
            "devices of the data axis"
        )


def newest(
    checkpoints: Checkpoints, state: Any, batches: grain.DatasetIterator, resume: bool
) -> tuple[Any, int]:
    """Where a run stands: ``state`` and 0 steps, or what a resumed one saved last.

    ``batches`` is set to the position that belongs to it.
    """
    if not resume or checkpoints.latest is None:
        return state, 0
    state, position = checkpoints.restore(state)
    batches.set_state(position)
    return state, int(state.step)


def run_steps(
    step: Step,
    state: Any,
    done: int,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    log: MetricsLog | None,
    *,
    settings: Any,
    mesh: Mesh,
    rules: ShardingRules,
    stop: Stop,
    note: Note,
) -> tuple[Any, int]:
    """Run the remaining steps; the device is read only when metrics are written.

    Args:
        settings: has ``steps``, ``log_every`` and ``save_every``.
        note: what the progress bar says of the figures written last.

    Returns:
        The state, and the steps taken: fewer than ``settings.steps`` where a signal came.
    """
    place = functools.partial(place_batch, sharding=batch_sharding(mesh, rules))
    with (
        _stopping(stop) as stopped,
        progress_bar("training", settings.steps, done, shown=leads()) as advance,
    ):
        ending = stopped(done)
        while done < settings.steps and not ending:
            batch = {name: place(array) for name, array in next(batches).items()}
            state, report = step(state, batch)
            # Written one step late: the device has the next step to work on meanwhile.
            if done % settings.log_every == 0:
                _write(log, done, advance, note)
            if log is not None:
                log.add(report)
            done += 1
            advance(1)
            ending = stopped(done)
            if done % settings.save_every == 0 or done == settings.steps or ending:
                _write(log, done, advance, note)
                checkpoints.save(done, state, batches.get_state())
    return state, done


def _write(log: MetricsLog | None, step: int, advance: Advance, note: Note) -> None:
    figures = None if log is None else log.flush(step)
    if figures:
        advance(note=note(figures))


@contextmanager
def _stopping(stop: Stop) -> Iterator[Callable[[int], bool]]:
    """Whether the run is to end, asked after each step; several processes agree on the step."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    with stop:
        yield lambda step: stop.pending
