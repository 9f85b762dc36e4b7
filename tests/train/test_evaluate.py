"""The evaluation job: figures of answers, resumed bit for bit, compared only when comparable."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration.file import Calibration, CalibrationEntry, save_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)
from train import evaluate as module
from train.comparison import compare, print_comparison
from train.config import TargetSection, TrainConfig, read_config
from train.evaluate import run_evaluation
from train.evaluate_config import DrafterName, EvaluateConfig, EvaluationSection, SetSection
from train.initialize import drafter_config, initial_weights
from train.shards import read_dataset
from train.stopping import Stop, Stopped


@pytest.fixture(scope="module")
def pair(request):
    """The tiny target and a drafter of its shape with random weights."""
    run = read_config(request.path.parents[2] / "configs" / "tiny.toml", TrainConfig)
    target = request.getfixturevalue("chatty")
    config = drafter_config(run.drafter, target)
    return target, LoadedDrafter(config, initial_weights(config, jax.random.key(0)), "random")


@pytest.fixture
def job(tmp_path):
    """Two sets of prompts, sampled, with a calibration."""
    for name, count in (("one", 3), ("two", 4)):
        lines = (json.dumps({"turns": [f"w{i} w{i + 30}", "and then"]}) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    save_calibration(
        Calibration((CalibrationEntry(0.0, (2.0,) * 4), CalibrationEntry(1.0, (0.5,) * 4))),
        tmp_path / "sts.json",
    )
    return EvaluateConfig(
        target=TargetSection("tests/golden/llama_tiny", "float32"),
        drafter=DrafterName("random"),
        evaluation=EvaluationSection(
            output=str(tmp_path / "run"),
            max_new_tokens=12,
            batch=2,
            num_anchors=8,
            temperatures=(1.0,),
            calibration=str(tmp_path / "sts.json"),
        ),
        sets=(
            SetSection("one", file=str(tmp_path / "one.jsonl"), language="en"),
            SetSection("two", file=str(tmp_path / "two.jsonl"), last=3, limit=2),
        ),
    )


def at(job, folder, **changes):
    section = dataclasses.replace(job.evaluation, output=str(folder), **changes)
    return dataclasses.replace(job, evaluation=section)


def report_of(folder):
    return (Path(folder) / "evaluation.json").read_bytes()


def test_a_run_measures_every_set_and_draws_it(pair, job, capsys):
    report = run_evaluation(job, *pair)
    [arm] = report["arms"]
    assert (arm["temperature"], arm["sts_temperatures"]) == (1.0, (0.5,) * 4)
    answers = {name: one["generated"]["answers"] for name, one in arm["sets"].items()}
    assert answers == {"one": 3, "two": 2}
    for one in arm["sets"].values():
        assert 1 <= one["generated"]["accepted_length"] <= 5
        assert 1 <= one["teacher_forced"]["expected_length"] <= 5
        assert len(one["generated"]["thresholds"]) == 10
        assert [row["position"] for row in one["generated"]["calibration"]] == [1, 2, 3, 4]
    lengths = [one["generated"]["accepted_length"] for one in arm["sets"].values()]
    assert arm["macro"]["generated"]["accepted_length"] == pytest.approx(np.mean(lengths))
    first = arm["all_sets"]["calibration"][0]
    assert first["ece_before"] is not None
    assert first["ece_after"] is not None
    assert "thresholds_calibrated" in arm["all_sets"]
    conditions = report["conditions"]
    assert conditions["sets"]["one"]["language"] == "en"
    assert conditions["sets"]["two"]["prompts"] == 2
    assert conditions["thinking"] is None
    folder = Path(job.evaluation.output)
    assert json.loads(report_of(folder)) == json.loads(json.dumps(report))
    for name in ("acceptance", "thresholds", "reliability-T1"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    assert json.loads((folder / "run.json").read_text())["config"]["evaluation"]["batch"] == 2
    told = capsys.readouterr().out
    assert "length, teacher-forced" in told
    assert "ECE after STS" in told


@pytest.mark.usefixtures("listening_to_ctrl_c", "undrawn")
def test_a_stopped_run_resumes_bit_for_bit_and_makes_no_answer_twice(
    pair, job, tmp_path, monkeypatch
):
    small = at(job, tmp_path / "whole", teacher_forced=False)
    run_evaluation(small, *pair)
    add = module.Journal.add
    for number in (signal.SIGTERM, signal.SIGINT):
        broken, added = at(small, tmp_path / f"broken-{number}"), []

        def counted(journal, key, done, number=number, added=added):
            add(journal, key, done)
            added.append(key)
            if len(added) == 2:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(module.Journal, "add", counted)
        with Stop() as stop, pytest.raises(Stopped):
            run_evaluation(broken, *pair, stop=stop)
        assert 2 <= len(added) < 5
        run_evaluation(broken, *pair, resume=True)
        assert len(added) == len(set(added)) == 5
        assert report_of(broken.evaluation.output) == report_of(tmp_path / "whole")


@pytest.mark.usefixtures("undrawn")
def test_another_config_does_not_continue_a_run(pair, job, tmp_path):
    small = at(job, tmp_path / "run", teacher_forced=False)
    run_evaluation(small, *pair)
    with pytest.raises(FileExistsError, match="--resume"):
        run_evaluation(small, *pair)
    with pytest.raises(ValueError, match=r"config\.evaluation\.seed was 980406 and is 1"):
        run_evaluation(at(small, tmp_path / "run", seed=1), *pair, resume=True)
    prompts = Path(job.sets[0].file)
    prompts.write_text(prompts.read_text().replace("w30", "w31"))
    with pytest.raises(ValueError, match=r"data\.sets\.one\.prompts_sha256"):
        run_evaluation(small, *pair, resume=True)


@pytest.mark.usefixtures("undrawn")
def test_tables_of_tokens_are_measured_like_any_pair_and_their_acceptance_is_known(job, tmp_path):
    """p is uniform over 8 tokens, q over 6 of them: a draft is accepted with 6/8, always."""
    vocabulary, width = 8, 3
    target = LoadedTarget(
        MarkovTargetConfig(vocabulary),
        MarkovTargetWeights(jnp.zeros((vocabulary, vocabulary))),
        Letters(),
        (),
        "toy",
    )
    drafter = LoadedDrafter(
        MarkovDrafterConfig(vocabulary, width),
        MarkovDrafterWeights(
            jnp.broadcast_to(jnp.where(jnp.arange(vocabulary) < 6, 0.0, -1e9), (8, 8)),
            jnp.full((width, vocabulary), float(np.log(3))),
        ),
        "table",
    )
    (tmp_path / "raw.jsonl").write_text('{"prompt": "12"}\n' * 40)
    settings = dataclasses.replace(
        job.evaluation,
        max_new_tokens=100,
        batch=40,
        temperatures=(0.0, 1.0),
        calibration=None,
        teacher_forced=False,
    )
    sets = (SetSection("raw", file=str(tmp_path / "raw.jsonl")),)
    report = run_evaluation(
        dataclasses.replace(job, evaluation=settings, sets=sets), target, drafter
    )
    assert [arm["temperature"] for arm in report["arms"]] == [0.0, 1.0]
    figures = report["arms"][1]["sets"]["raw"]["generated"]
    expected = [6 / 8] * 3
    np.testing.assert_allclose(figures["conditional_acceptance"], expected, atol=0.06)
    assert figures["accepted_length"] == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3, abs=0.12)
    # confidences of exactly 0.75 are calibrated: nothing is left for STS to mend
    assert all(row["ece_before"] < 0.06 for row in figures["calibration"])
    assert report["conditions"]["template_sha256"] is None
    assert report["arms"][1]["all_sets"]["calibration"][0]["ece_after"] is None


class Letters:
    """Token i is the digit i; no chat."""

    has_template = False

    def encode(self, text):
        return [int(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(str, ids))


@pytest.mark.usefixtures("undrawn")
def test_a_data_folder_is_measured_teacher_forced(pair, job, tiny_run):
    folder = Path(tiny_run.data.folders[0])
    manifest = json.loads((folder / "manifest.json").read_text()) | {"temperature": 1.0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    sets = (SetSection("data", folder=str(folder)),)
    section = job.evaluation
    config = dataclasses.replace(job, sets=sets)
    report = run_evaluation(config, *pair)
    figures = report["arms"][0]["sets"]["data"]
    assert set(figures) == {"teacher_forced"}
    assert figures["teacher_forced"]["data_temperature"] == 1.0
    assert report["conditions"]["sets"]["data"]["documents"] == len(read_dataset(folder))
    thoughtful = dataclasses.replace(section, thinking=True, output=section.output + "2")
    with pytest.raises(ValueError, match=r"written with thinking = None, the evaluation has True"):
        run_evaluation(dataclasses.replace(config, evaluation=thoughtful), *pair)


def saved(path, report, **conditions):
    changed = {**report, "conditions": {**report["conditions"], **conditions}}
    path.write_text(json.dumps(changed))
    return path


REPORT = {
    "drafter": "mine",
    "conditions": {
        "target": "t",
        "template_sha256": "a",
        "thinking": False,
        "temperatures": [1.0],
        "sets": {"chat": {"language": "en", "prompts": 5}},
    },
    "arms": [
        {
            "temperature": 1.0,
            "sets": {"chat": {"generated": {"accepted_length": 3.0}}},
            "macro": {"generated": {"accepted_length": 3.0}},
        }
    ],
}


def test_two_runs_compare_by_their_accepted_drafts(tmp_path, capsys):
    other = json.loads(json.dumps(REPORT).replace("3.0", "2.0").replace("mine", "yours"))
    paths = saved(tmp_path / "a.json", REPORT), saved(tmp_path / "b.json", other)
    [row] = compare(*paths)
    assert row["sets"]["chat"] == {"first": 3.0, "second": 2.0, "ratio": 2.0}
    print_comparison(*paths)
    told = capsys.readouterr().out
    assert "mine" in told
    assert "yours" in told
    [same] = compare(paths[0], paths[0])
    assert same["sets"]["macro"]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "temperatures",
            [0.0],
            r"temperatures is \[1\.0\] in the first and \[0\.0\] in the second",
        ),
        ("thinking", True, "thinking is False in the first and True in the second"),
        ("template_sha256", "b", "template_sha256 is 'a' in the first and 'b' in the second"),
        ("target", "u", "target is 't' in the first and 'u' in the second"),
        ("sets", {"chat": {"language": "zh", "prompts": 5}}, r"sets\.chat\.language is 'en'"),
        ("sets", {"code": {"language": "en", "prompts": 5}}, r"sets\.chat\.language is 'en'"),
    ],
)
def test_runs_under_different_conditions_are_not_compared(tmp_path, name, value, message):
    paths = saved(tmp_path / "a.json", REPORT), saved(tmp_path / "b.json", REPORT, **{name: value})
    with pytest.raises(ValueError, match=message):
        compare(*paths)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "is no report")])
def test_something_else_is_not_compared(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        compare(tmp_path / "a.json", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": (-1.0,)}, r"temperatures are \[-1\.0\]"),
        ({"temperatures": ()}, r"temperatures are \[\]"),
        ({"temperatures": (1.0, 1.0)}, "different numbers"),
        ({"batch": 0}, r"evaluation\.batch is 0"),
        ({"seed": -1}, r"evaluation\.seed is -1"),
    ],
)
def test_a_wrong_config_is_refused_by_name(job, change, message):
    with pytest.raises(ValueError, match=message):
        at(job, "x", **change)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give one of the two"),
        ({"file": "a", "folder": "b"}, "give one of the two"),
        ({"file": "a", "last": 0}, "last is 0"),
    ],
)
def test_a_wrong_set_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=f"set 'x'.*{message}"):
        SetSection("x", **values)


def test_sets_need_names_of_their_own_and_folders_teacher_forcing(job):
    with pytest.raises(ValueError, match="different names"):
        dataclasses.replace(job, sets=job.sets * 2)
    section = dataclasses.replace(job.evaluation, teacher_forced=False)
    with pytest.raises(ValueError, match=r"set 'd' is a folder"):
        dataclasses.replace(job, evaluation=section, sets=(SetSection("d", folder="d"),))
