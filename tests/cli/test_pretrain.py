"""`dspark pretrain` from the command line: a run, its resumption, and wrong configs."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.cli.main import main
from dspark_jax.testing.deepseek_v32 import toy_config
from dspark_jax.text.text import Text
from train.data import supervised_answer
from train.shards import write_manifest, write_shard

TEACHER = Path(__file__).parents[1] / "golden" / "llama_tiny"
SHAPE = toy_config(vocab_size=160, num_hidden_layers=1)


@pytest.fixture
def config(tmp_path):
    """A run of a few steps, its teacher in the same folder."""
    teacher = tmp_path / "teacher"
    shutil.copytree(TEACHER, teacher)
    words = {f"w{number}": number for number in range(160)}
    Text(Tokenizer(models.WordLevel(words, "w0")), None).save(teacher)
    write_manifest(tmp_path / "data", {"target": str(teacher), "template_sha256": ""})
    generator = np.random.default_rng(0)
    documents = [supervised_answer([20, 21], generator.integers(17, 150, 20)) for _ in range(8)]
    write_shard(tmp_path / "data", 0, documents)
    shape = dataclasses.asdict(SHAPE)
    lines = [f"{name} = {value}" for name, value in shape.items() if value is not None]
    path = tmp_path / "run.toml"
    path.write_text(
        "\n".join(
            [
                f"teacher.name = {json.dumps(str(teacher))}",
                f"data.folders = [{json.dumps(str(tmp_path / 'data'))}]",
                "data.sequence_length = 24",
                "[deepseek_v32]",
                *lines,
                "[training]",
                f"output = {json.dumps(str(tmp_path / 'run'))}",
                "steps = 3\nlearning_rate = 1e-2\nbatch_size = 8\nlog_every = 1",
                'dtype = "float32"',
            ]
        )
    )
    return path


def test_a_run_writes_a_target_that_loads_and_the_same_run_again_is_refused(
    config, tmp_path, capsys
):
    assert main(["pretrain", str(config)]) == 0
    assert f"target written to {tmp_path / 'run' / 'target'}" in capsys.readouterr().out
    target = load_target(tmp_path / "run" / "target", "float32")
    assert target.config == SHAPE
    assert target.text.encode("w7") == [7]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["training"]["optimizer"] == "adamw"
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert main(["pretrain", str(config)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["pretrain", str(config), "--resume"]) == 0


def test_an_unknown_key_and_nothing_to_resume_are_errors_of_one_line(config, capsys):
    assert main(["pretrain", str(config), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    config.write_text(config.read_text().replace("kv_lora_rank", "kv_rank"))
    assert main(["pretrain", str(config)]) == 2
    assert "unknown key 'kv_rank'" in capsys.readouterr().err
