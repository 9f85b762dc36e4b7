"""`dspark train` from the command line: a run, its resumption, and wrong configs."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.cli.main import main
from train.data import supervised_answer
from train.shards import write_manifest, write_shard

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The shipped tiny run, its folders moved to a temporary place.

    Its steps are those of the job's own tests, which compile the same program.
    """
    monkeypatch.chdir(ROOT)
    generator = np.random.default_rng(0)
    write_manifest(tmp_path / "data", {"target": "tests/golden/llama_tiny", "template_sha256": ""})
    documents = [supervised_answer([20, 21], generator.integers(17, 150, 20)) for _ in range(8)]
    write_shard(tmp_path / "data", 0, documents)
    text = (ROOT / "configs" / "tiny.toml").read_text()
    for before, after in (
        ("data/tiny", str(tmp_path / "data")),
        ("runs/tiny", str(tmp_path / "run")),
        ("save_every = 5", "save_every = 100"),
    ):
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_run_writes_drafter_metrics_and_its_record_and_is_not_begun_twice(
    config, tmp_path, capsys
):
    assert main(["train", str(config)]) == 0
    run = tmp_path / "run"
    assert (run / "drafter" / "config.json").exists()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 12
    assert list((run / "tensorboard").iterdir())
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["training"]["learning_rate"] == 6e-4
    assert record["versions"]["jax"]
    assert main(["train", str(config)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", str(config), "--resume"]) == 0


def test_an_unknown_key_is_an_error_of_one_line(config, capsys):
    config.write_text(config.read_text().replace("steps", "stepz"))
    assert main(["train", str(config)]) == 2
    assert "unknown key 'stepz'" in capsys.readouterr().err


def test_nothing_to_resume_is_an_error(config, capsys):
    assert main(["train", str(config), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
