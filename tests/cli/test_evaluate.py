"""`dspark evaluate` from the command line: a run of tables of tokens, and wrong command lines."""

import json

import jax.numpy as jnp
import pytest

from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.cli.main import main
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)
from train.stopping import Stopped

VOCAB = 8


class Digits:
    """Token i is the digit i; no chat."""

    has_template = False

    def encode(self, text):
        return [int(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(str, ids))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A counting target and a drafter that counts along, wherever they are asked for."""
    counting = 20.0 * jnp.roll(jnp.eye(VOCAB), 1, axis=1)
    target = MarkovTargetConfig(VOCAB), MarkovTargetWeights(counting)
    drafter = MarkovDrafterConfig(VOCAB, 3), MarkovDrafterWeights(counting, jnp.ones((3, VOCAB)))
    monkeypatch.setattr(
        resolve, "load_target", lambda name, _: LoadedTarget(*target, Digits(), (), name)
    )
    monkeypatch.setattr(
        drafters, "load_drafter", lambda name, *_, **__: LoadedDrafter(*drafter, name)
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12"}\n{"prompt": "5"}\n')
    path = tmp_path / "evaluate.toml"
    path.write_text(
        f"""
        [target]
        name = "counting"
        dtype = "float32"
        [drafter]
        name = "along"
        [evaluation]
        output = "{tmp_path / "run"}"
        temperatures = [0.0]
        max_new_tokens = 9
        teacher_forced = false
        [[sets]]
        name = "digits"
        file = "{tmp_path / "prompts.jsonl"}"
        """
    )
    return path


def test_a_run_leaves_its_report_and_two_of_them_compare(config, tmp_path, capsys):
    assert main(["evaluate", str(config)]) == 0
    report = tmp_path / "run" / "evaluation.json"
    figures = json.loads(report.read_text())["arms"][0]["sets"]["digits"]["generated"]
    assert figures["accepted_length"] == 4.0
    assert figures["conditional_acceptance"] == [1.0, 1.0, 1.0]
    assert main(["evaluate", "--compare", str(report), str(report)]) == 0
    assert "accepted drafts, first/second" in capsys.readouterr().out
    assert main(["evaluate", str(config)]) == 2
    assert "--resume" in capsys.readouterr().err
    other = json.loads(report.read_text())
    other["conditions"]["thinking"] = True
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert main(["evaluate", "--compare", str(report), str(tmp_path / "other.json")]) == 2
    assert "thinking is None in the first and True in the second" in capsys.readouterr().err


def test_a_stopped_run_says_how_to_go_on(config, capsys, monkeypatch):
    def stopped(*_, **__):
        raise Stopped(143)

    monkeypatch.setattr("train.evaluate.run_evaluation", stopped)
    assert main(["evaluate", str(config)]) == 143
    assert f"dspark evaluate {config} --resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of CONFIG.toml and --compare"),
        (["x.toml", "--compare", "a", "b"], "give one of CONFIG.toml and --compare"),
        (["--compare", "no-such.json", "b.json"], "no-such.json"),
        (["--resume", "--compare", "a.json", "b.json"], "--resume continues the run of CONFIG"),
    ],
)
def test_a_wrong_command_line_is_one_line_of_error(capsys, arguments, message):
    assert main(["evaluate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_teacher_forcing_a_table_is_refused_before_anything_runs(config, tmp_path, capsys):
    config.write_text(config.read_text().replace("teacher_forced = false", ""))
    assert main(["evaluate", str(config)]) == 2
    assert "set evaluation.teacher_forced to false" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
