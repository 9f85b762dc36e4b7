"""A tiny target, tiny data and a tiny run for the training tests."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from train.config import TrainConfig, read_config
from train.data import supervised_answer, write_manifest, write_shard

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def tiny_target() -> LoadedTarget:
    loaded = load_target(GOLDEN / "llama_tiny", jnp.float32)
    return dataclasses.replace(loaded, name="tests/golden/llama_tiny")


@pytest.fixture
def tiny_run(tmp_path: Path) -> TrainConfig:
    """The shipped tiny config, with data and output in a temporary folder."""
    generator = np.random.default_rng(0)
    documents = [
        supervised_answer(generator.integers(17, 150, 4), generator.integers(17, 150, size))
        for size in generator.integers(12, 30, 21)
    ]
    data = tmp_path / "data"
    write_manifest(data, {"target": "tests/golden/llama_tiny", "template_sha256": ""})
    write_shard(data, 0, documents)
    config = read_config(ROOT / "configs" / "tiny.toml", TrainConfig)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, folders=(str(data),)),
        training=dataclasses.replace(config.training, output=str(tmp_path / "run")),
    )
