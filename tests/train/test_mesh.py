"""A run on a mesh of devices is the run on one device."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from dspark_jax.checkpoints.drafter import load_drafter
from train import trainer
from train.checkpointing import Checkpoints
from train.initialize import drafter_config
from train.mesh import MeshSection, ShardingRules, training_mesh, weight_shardings
from train.step import initial_state
from train.trainer import run_training

ROOT = Path(__file__).parents[2]


def written(run, path, **mesh):
    """``run`` as a TOML file, with another mesh."""
    tables = dataclasses.asdict(run)
    tables["mesh"] |= mesh
    lines = []
    for name, table in tables.items():
        if table is None:
            continue
        lines.append(f"[{name}]")
        set_ones = {key: value for key, value in table.items() if value is not None}
        lines += [f"{key} = {json.dumps(value)}" for key, value in set_ones.items()]
    path.write_text("\n".join(lines))
    return path


def start(*arguments):
    script = Path(__file__).with_name("on_devices.py")
    return subprocess.Popen(
        [sys.executable, *map(str, (script, *arguments))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes):
    for process in processes:
        told, _ = process.communicate(timeout=240)
        assert process.returncode == 0, told


def figures(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]


def assert_same_run(found, expected, target):
    """Metrics of every step, gradient norms among them, and the drafter at the end."""
    assert len(figures(found)) == len(figures(expected)) > 4
    for mine, theirs in zip(figures(found), figures(expected), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=2e-4, atol=1e-5, err_msg=name)
    pair = (target.config, target.weights)
    weights = [
        load_drafter(str(Path(folder) / "drafter"), pair, "float32").weights
        for folder in (found, expected)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *weights)


@pytest.fixture
def run(tiny_run):
    training = dataclasses.replace(tiny_run.training, batch_size=8, steps=5)
    return dataclasses.replace(tiny_run, training=training)


def last_state(run, target):
    """What the last checkpoint of a run holds, on one device."""
    saved = Checkpoints(Path(run.training.output) / "checkpoints")
    assert saved.latest == run.training.steps
    state, _ = saved.restore(initial_state(run, drafter_config(run.drafter, target)))
    saved.close()
    return state


def test_eight_devices_of_two_processes_finish_what_one_began(
    run, tiny_target, tmp_path, monkeypatch
):
    """Weights and rows of the vocabulary are spread: no process holds logits of all of it."""
    assert run_training(run, tiny_target)
    section = dataclasses.replace(run.training, output=str(tmp_path / "many"))
    many = dataclasses.replace(run, training=section)
    step, taken = trainer.train_step, iter(range(1, 1000))

    def interrupted(*arguments):
        if next(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", interrupted)
        assert not run_training(many, tiny_target)
    assert len(figures(section.output)) == 3
    config = written(many, tmp_path / "many.toml", vocabulary=2, shard_weights=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rows = tiny_target.config.vocab_size // 2
    finish(*(start(config, 4, index, 2, port, rows) for index in range(2)))
    assert_same_run(section.output, run.training.output, tiny_target)
    found, expected = (last_state(one, tiny_target) for one in (many, run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_a_mesh_that_is_not_the_devices_is_refused_naming_both():
    with pytest.raises(ValueError, match="data 3 x vocabulary 2 holds 6 devices; this run has 1"):
        training_mesh(MeshSection(data=3, vocabulary=2))


def test_a_batch_that_does_not_divide_is_refused_before_anything_runs(
    run, tiny_target, monkeypatch
):
    mesh = AbstractMesh((3, 1), ("data", "vocabulary"), axis_types=(AxisType.Auto,) * 2)
    monkeypatch.setattr("train.trainer.training_mesh", lambda section: mesh)
    with pytest.raises(ValueError, match="batch_size 8 does not divide over the 3 devices"):
        run_training(run, tiny_target)
    assert not Path(run.training.output).exists()


def test_vocabulary_rows_and_weights_are_spread_where_they_divide():
    mesh = AbstractMesh((4, 2), ("data", "vocabulary"), axis_types=(AxisType.Auto,) * 2)
    shape = jax.ShapeDtypeStruct
    tree = {
        "table": shape((160, 8), "float32"),
        "matrix": shape((32, 12), "float32"),
        "odd": shape((7, 5), "float32"),
        "count": shape((8,), "int32"),
    }
    rules = ShardingRules(weights="data")
    found = {name: s.spec for name, s in weight_shardings(mesh, rules, tree, 160).items()}
    assert found["table"] == PartitionSpec("vocabulary", "data")
    assert found["matrix"] == PartitionSpec("data")
    assert found["odd"] == PartitionSpec()
    assert found["count"] == PartitionSpec()
    whole = weight_shardings(mesh, ShardingRules(), tree, 160)
    assert whole["matrix"].spec == PartitionSpec()
