"""`dspark calibrate` and `dspark generate --record-confidences` from the command line."""

import json
import os
import signal

import numpy as np
import pytest

from dspark_jax.calibration.file import load_calibration
from dspark_jax.calibration.records import read_records
from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.cli import generate as generate_command
from dspark_jax.cli.main import main
from dspark_jax.testing.chatty import WORDS, chatty_pair
from train.journal import Journal


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The toy pair under its two names, and forty prompts for it."""
    target, drafter = chatty_pair(np.array([2.0, 0.6]))
    for module in (resolve, generate_command):
        monkeypatch.setattr(module, "load_target", lambda name, dtype: target)
    for module in (drafters, generate_command):
        monkeypatch.setattr(module, "load_drafter", lambda name, pair, dtype, **_: drafter)
    words = WORDS[3:]
    turns = [f"{first} {second}" for first in words[:8] for second in words[:5]]
    lines = [json.dumps({"turns": [turn]}) for turn in turns]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """Runs without diagrams, which take longer than all else in them."""
    monkeypatch.setattr("train.calibrate.draw_reliability", lambda *_, **__: None)


def write_config(folder, source, *, output="run", temperatures="[1.0]"):
    path = folder / "calibrate.toml"
    path.write_text(
        f"""
        [target]
        name = "chatty"
        [drafter]
        name = "chatty-drafter"
        [fit]
        temperatures = {temperatures}
        [output]
        folder = "{folder / output}"
        {source}
        """
    )
    return path


def collect(folder):
    return f"""
        [collect]
        prompts = ["{folder / "prompts.jsonl"}"]
        max_new_tokens = 30
        max_context = 48
        samples_per_prompt = 2
        batch = 16
        """


def test_a_run_tells_its_figures_and_is_not_begun_twice(folder, capsys):
    config = write_config(folder, collect(folder))
    assert main(["calibrate", str(config)]) == 0
    told = capsys.readouterr().out
    assert "mean ECE" in told
    assert "test blocks are too few" in told
    calibration = load_calibration(folder / "run" / "calibration.json", block_size=2)
    assert calibration.entries[0].temperature == 1.0
    assert main(["calibrate", str(config)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["calibrate", str(config), "--resume"]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("listening_to_ctrl_c", "undrawn")
def test_a_signal_ends_a_run_that_can_go_on(folder, capsys, monkeypatch, number, code):
    config = write_config(folder, collect(folder))
    add = Journal.add

    def add_and_signal(self, key, completion):
        add(self, key, completion)
        if len(self.kept) == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add_and_signal)
        assert main(["calibrate", str(config)]) == code
    assert f"dspark calibrate {config} --resume" in capsys.readouterr().out
    assert main(["calibrate", str(config), "--resume"]) == 0
    assert len(read_records(folder / "run" / "records-T1.jsonl").answers) == 80


def test_an_unknown_key_and_a_missing_record_file_are_errors_of_one_line(folder, capsys):
    config = write_config(folder, collect(folder) + "prompt_file = 'x'")
    assert main(["calibrate", str(config)]) == 2
    assert "unknown key 'prompt_file'" in capsys.readouterr().err
    config = write_config(folder, f"[records]\nfiles = ['{folder / 'none.jsonl'}']")
    assert main(["calibrate", str(config)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def generate(folder, out, *flags):
    words = f"--target chatty --drafter d --prompts {folder / 'prompts.jsonl'} --batch 16"
    settings = "--max-new-tokens 30 --max-context 48 --temperature 1 --seed 3"
    return main(
        ["generate", *words.split(), *settings.split(), "--record-confidences", str(out), *flags]
    )


@pytest.mark.usefixtures("undrawn")
def test_recorded_answers_of_generate_can_be_fitted(folder, capsys):
    out = folder / "records.jsonl"
    assert generate(folder, out, "--mode", "static") == 0
    records = read_records(out)
    assert len(records.answers) == 40
    assert records.source.temperature == 1.0
    assert records.source.calibration is None
    config = write_config(folder, f"[records]\nfiles = ['{out}']")
    assert main(["calibrate", str(config)]) == 0
    assert load_calibration(folder / "run" / "calibration.json", block_size=2).block_size == 2


def test_records_of_a_mode_that_trims_are_refused(folder, capsys):
    out = folder / "records.jsonl"
    assert generate(folder, out, "--mode", "compact") == 0
    config = write_config(folder, f"[records]\nfiles = ['{out}']")
    assert main(["calibrate", str(config)]) == 2
    assert "mode is 'compact', a fit wants 'static'" in capsys.readouterr().err


def test_records_made_under_a_calibration_are_refused(folder, capsys):
    calibration = folder / "c.json"
    calibration.write_text('{"entries": [{"temperature": 1.0, "temperatures": [1.5, 1.0]}]}')
    out = folder / "records.jsonl"
    assert generate(folder, out, "--mode", "static", "--calibration", str(calibration)) == 0
    config = write_config(folder, f"[records]\nfiles = ['{out}']")
    assert main(["calibrate", str(config)]) == 2
    assert "calibration is (1.5, 1.0), a fit wants None" in capsys.readouterr().err


def test_nothing_is_recorded_without_a_drafter(folder, capsys):
    out = folder / "records.jsonl"
    assert generate(folder, out, "--drafter", "none") == 2
    assert "record_confidences needs a drafter" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_does_not_exist_is_told_before_anything_is_decoded(folder, capsys):
    assert generate(folder, folder / "nowhere" / "records.jsonl") == 2
    assert "nowhere to write records in" in capsys.readouterr().err
