"""The job: a run finishes, stops, resumes bit for bit, and refuses what is not the same run."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from train import trainer
from train.checkpointing import Checkpoints
from train.initialize import drafter_config
from train.step import compiled_part, initial_state, train_step
from train.stopping import Stop
from train.trainer import run_training


def lines(run):
    return [json.loads(line) for line in (Path(run.training.output) / "metrics.jsonl").open()]


def at(run, folder):
    return dataclasses.replace(run, training=dataclasses.replace(run.training, output=str(folder)))


def stop_after(monkeypatch, steps, number=signal.SIGTERM):
    """A signal arrives while step number ``steps`` is being dispatched."""
    real, count = trainer.train_step, iter(range(1, 1000))

    def step(*arguments):
        if next(count) == steps:
            os.kill(os.getpid(), number)
        return real(*arguments)

    monkeypatch.setattr(trainer, "train_step", step)


def test_a_run_that_is_stopped_and_resumed_equals_an_unbroken_one(
    tiny_run, tiny_target, tmp_path, monkeypatch
):
    often = dataclasses.replace(
        tiny_run, training=dataclasses.replace(tiny_run.training, save_every=5)
    )
    unbroken, broken = at(often, tmp_path / "unbroken"), at(often, tmp_path / "broken")
    assert run_training(unbroken, tiny_target)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert not run_training(broken, tiny_target)
    assert len(lines(broken)) == 7

    saved = Checkpoints(Path(broken.training.output) / "checkpoints")
    assert saved.latest == 7
    like = initial_state(broken, drafter_config(broken.drafter, tiny_target))
    state, position = saved.restore(like)
    saved.close()
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 2]
    assert moments
    assert all(jnp.any(leaf != 0) for leaf in moments)
    assert position != {"next_index": 0}

    assert run_training(broken, tiny_target, resume=True)
    assert lines(broken)[7:12] == lines(unbroken)[7:12]
    assert lines(broken) == lines(unbroken)
    assert len({line["learning_rate"] for line in lines(broken)[7:12]}) == 5
    first, second = (
        (Path(run.training.output) / "drafter" / "model.safetensors").read_bytes()
        for run in (unbroken, broken)
    )
    assert first == second


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_ctrl_c_saves_and_ends_the_run(tiny_run, tiny_target, monkeypatch):
    stop = Stop()
    stop_after(monkeypatch, 2, signal.SIGINT)
    assert not run_training(tiny_run, tiny_target, stop=stop)
    assert stop.code == 130
    saved = Checkpoints(Path(tiny_run.training.output) / "checkpoints")
    assert saved.latest == 2
    saved.close()


def test_a_finished_run_leaves_a_drafter_that_loads_was_traced_once_and_left_the_target_alone(
    tiny_run, tiny_target
):
    before = jax.tree.map(np.array, tiny_target.weights)
    programs = train_step._cache_size()
    assert run_training(tiny_run, tiny_target)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, tiny_target.weights))
    assert train_step._cache_size() <= programs + 1
    target = (tiny_target.config, tiny_target.weights)
    loaded = load_drafter(Path(tiny_run.training.output) / "drafter", target)
    assert loaded.config == drafter_config(tiny_run.drafter, tiny_target)


def test_runs_that_differ_in_names_alone_share_one_program(tiny_run):
    other = dataclasses.replace(
        at(tiny_run, "elsewhere"), target=dataclasses.replace(tiny_run.target, name="its alias")
    )
    assert compiled_part(other) == compiled_part(tiny_run)
    faster = dataclasses.replace(tiny_run.training, learning_rate=1.0)
    assert compiled_part(dataclasses.replace(tiny_run, training=faster)) != compiled_part(tiny_run)


@pytest.mark.parametrize("head", ["none", "gated", "rnn"])
def test_every_head_trains_and_the_loss_falls(tiny_run, tiny_target, head):
    # a walk is unrolled: longer blocks only take longer to compile
    section = dataclasses.replace(
        tiny_run.drafter,
        block_size=2,
        markov_rank=0 if head == "none" else 8,
        markov_head_type="vanilla" if head == "none" else head,
    )
    training = dataclasses.replace(tiny_run.training, steps=30, learning_rate=3e-3)
    run = dataclasses.replace(tiny_run, drafter=section, training=training)
    assert run_training(run, tiny_target)
    losses = [line["loss"] for line in lines(run)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.fixture(scope="module")
def finished(shared_tiny_run, tiny_target):
    assert run_training(shared_tiny_run, tiny_target)
    return shared_tiny_run


def test_a_second_run_in_the_same_folder_is_refused(finished, tiny_target):
    with pytest.raises(FileExistsError, match="--resume"):
        run_training(finished, tiny_target)


def test_a_changed_run_is_not_resumed(finished, tiny_target):
    changed = dataclasses.replace(finished.training, learning_rate=1e-3)
    with pytest.raises(ValueError, match=r"config.training.learning_rate was 0.0006 and is 0.001"):
        run_training(dataclasses.replace(finished, training=changed), tiny_target, resume=True)


def test_data_of_another_target_is_refused(tiny_run, tiny_target):
    other = dataclasses.replace(tiny_target, name="other")
    with pytest.raises(ValueError, match="other"):
        run_training(tiny_run, other)
