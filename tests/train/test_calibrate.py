"""The calibration job on a toy pair whose right temperatures are known."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.calibration.file import load_calibration
from dspark_jax.calibration.records import Records, read_records, stack_blocks, write_records
from dspark_jax.testing.chatty import WORDS, chatty_pair
from train.calibrate import CALIBRATION, REPORT, SGLANG, run_calibration
from train.calibrate_config import (
    CalibrateConfig,
    CollectSection,
    FitSection,
    OutputSection,
    PairedDrafter,
    RecordsSection,
)
from train.config import TargetSection, from_table
from train.journal import Journal
from train.stopping import Stop, Stopped

TRUE = np.array([2.0, 0.6])
BATCH = 32
"""The same in all jobs, which then share their compiled programs."""


@pytest.fixture(scope="module")
def pair():
    return chatty_pair(TRUE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = WORDS[3:]
    turns = [f"{first} {second}" for first in words[:10] for second in words[:6]]
    turns.append(" ".join(words))  # leaves no room for 40 tokens in a context of 64
    path.write_text("".join(json.dumps({"turns": [turn, "later"]}) + "\n" for turn in turns))
    return path


@pytest.fixture
def job(tmp_path, prompts, undrawn):
    return CalibrateConfig(
        target=TargetSection("chatty"),
        drafter=PairedDrafter("chatty-drafter"),
        fit=FitSection((1.0,)),
        output=OutputSection(str(tmp_path / "run")),
        collect=CollectSection(
            (str(prompts),), max_new_tokens=40, max_context=64, samples_per_prompt=12, batch=BATCH
        ),
    )


def small(job, **changes):
    """The job with few answers."""
    return dataclasses.replace(
        job, collect=dataclasses.replace(job.collect, samples_per_prompt=1, **changes)
    )


def from_files(job, tmp_path, *files, temperatures=(1.0,), folder="refit"):
    return dataclasses.replace(
        job,
        collect=None,
        records=RecordsSection(tuple(map(str, files))),
        fit=dataclasses.replace(job.fit, temperatures=temperatures),
        output=OutputSection(str(tmp_path / folder)),
    )


@pytest.fixture(scope="module")
def recorded(pair, prompts, tmp_path_factory):
    """A finished run and its folder."""
    folder = tmp_path_factory.mktemp("calibrated")
    config = CalibrateConfig(
        target=TargetSection("chatty"),
        drafter=PairedDrafter("chatty-drafter"),
        fit=FitSection((1.0, 0.0)),
        output=OutputSection(str(folder), sglang_temperature=0.0),
        collect=CollectSection(
            (str(prompts),), max_new_tokens=40, max_context=64, samples_per_prompt=12, batch=BATCH
        ),
    )
    return run_calibration(config, *pair), folder


def test_real_verification_gives_back_the_temperatures_that_are_known(recorded):
    reports, folder = recorded
    sampled = reports[1]
    assert sampled.temperature == 1.0
    np.testing.assert_allclose(sampled.sts, TRUE, rtol=0.13)
    assert sampled.mean_ece_after < 0.02 < sampled.mean_ece_before
    assert not sampled.shrunk
    for one in sampled.positions:
        assert one.conditional_auroc_after == pytest.approx(one.conditional_auroc_before, abs=1e-9)
    calibration = load_calibration(folder / CALIBRATION, block_size=2)
    assert calibration.nearest(1.0).temperatures == sampled.sts
    assert calibration.nearest(1.0).ece_after == tuple(p.ece_after for p in sampled.positions)


def test_recorded_acceptance_is_what_the_tables_say(pair, recorded):
    """Confidences are exact functions of it, so their means tell, position by position."""
    records = read_records(recorded[1] / "records-T1.jsonl")
    blocks = stack_blocks(records.answers, 2)
    for position in range(2):
        reached = blocks.reached[:, position]
        right = 1 / (1 + np.exp(-blocks.logits[reached, position] / TRUE[position]))
        observed = blocks.survived[reached, position].mean()
        assert observed == pytest.approx(right.mean(), abs=4 * 0.5 / np.sqrt(reached.sum()))


def test_a_run_leaves_its_record_its_figures_and_sglangs_file(recorded):
    reports, folder = recorded
    record = json.loads((folder / "run.json").read_text())
    assert record["config"]["fit"]["test_fraction"] == 0.5
    assert record["versions"]["jax"]
    report = json.loads((folder / REPORT).read_text())
    assert report["temperatures"][1]["test_blocks"] == reports[1].test_blocks
    assert report["made_with"]["drafter"] == "chatty-drafter"
    for name in ("reliability-T0.png", "reliability-T1.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    sglang = load_calibration(folder / SGLANG, block_size=2)
    assert sglang.entries == (load_calibration(folder / CALIBRATION, block_size=2).entries[0],)
    assert not list(folder.glob("answers-*"))


def test_fit_and_test_prompts_are_apart_and_all_answers_are_used(recorded):
    greedy, sampled = recorded[0]
    assert sampled.fit_prompts == sampled.test_prompts == 30
    records = read_records(recorded[1] / "records-T1.jsonl")
    assert len(records.answers) == 60 * 12
    steps = sum(len(answer.accepted) for answer in records.answers)
    assert steps == sampled.fit_blocks + sampled.test_blocks
    # greedy samples of a prompt would all be one
    assert len(read_records(recorded[1] / "records-T0.jsonl").answers) == 60
    assert any("too little data" in note for note in greedy.notes)
    assert any("test blocks are too few" in note for note in sampled.notes)


def test_a_job_that_broke_off_goes_on_without_loss_or_doubling(pair, job, tmp_path, monkeypatch):
    whole = small(job)
    run_calibration(whole, *pair)
    wanted = read_records(tmp_path / "run" / "records-T1.jsonl")
    broken = dataclasses.replace(whole, output=OutputSection(str(tmp_path / "broken")))
    add = Journal.add

    def crash(self, key, completion):
        if len(self.kept) == 7:
            raise OSError("no space left on device")
        add(self, key, completion)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", crash)
        with pytest.raises(OSError, match="no space"):
            run_calibration(broken, *pair)
    assert len(Journal(tmp_path / "broken" / "answers-T1.jsonl").kept) == 7
    run_calibration(broken, *pair, resume=True)
    assert read_records(tmp_path / "broken" / "records-T1.jsonl") == wanted


def test_a_signal_keeps_the_answers_that_had_ended(pair, job, tmp_path, monkeypatch):
    job = small(job)
    stop = Stop()
    original = Journal.add

    def add(self, key, completion):
        original(self, key, completion)
        stop.pending = True

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add)
        with pytest.raises(Stopped):
            run_calibration(job, *pair, stop=stop)
    kept = len(Journal(tmp_path / "run" / "answers-T1.jsonl").kept)
    assert 0 < kept < 60
    run_calibration(job, *pair, resume=True)
    assert len(read_records(tmp_path / "run" / "records-T1.jsonl").answers) == 60


def test_a_drafter_trained_anew_does_not_continue_the_records_of_the_old_one(pair, job):
    job = small(job)
    run_calibration(job, *pair)
    target, _ = pair
    with pytest.raises(ValueError, match=r"data\.drafter_sha256 was"):
        run_calibration(job, target, chatty_pair(TRUE, seed=1)[1], resume=True)


def test_prompts_without_room_are_left_out_and_said(pair, job, capsys):
    run_calibration(small(job), *pair)
    assert "1 prompts leave no room" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no prompt of .* leaves room for 40 tokens"):
        run_calibration(small(job, max_context=42), *pair)


def test_one_prompt_is_told_to_be_too_few_before_it_is_answered(pair, job, tmp_path):
    single = tmp_path / "single.jsonl"
    single.write_text(json.dumps({"turns": ["w1"]}) + "\n")
    with pytest.raises(ValueError, match=r"single\.jsonl hold one prompt"):
        run_calibration(small(job, prompts=(str(single),)), *pair)


@pytest.mark.parametrize("method", ["gradient", "online"])
def test_recorded_files_can_be_fitted_by_every_method(job, recorded, tmp_path, method):
    refit = from_files(job, tmp_path, recorded[1] / "records-T1.jsonl")
    refit = dataclasses.replace(refit, fit=dataclasses.replace(refit.fit, method=method))
    (report,) = run_calibration(refit)
    np.testing.assert_allclose(report.sts, TRUE, rtol=0.13)
    made_with = json.loads((tmp_path / "refit" / CALIBRATION).read_text())["made_with"]
    assert made_with["method"] == method


def test_records_given_twice_count_once_and_it_is_said(job, recorded, tmp_path):
    file = recorded[1] / "records-T1.jsonl"
    again = tmp_path / "again.jsonl"
    again.write_bytes(file.read_bytes())
    (report,) = run_calibration(from_files(job, tmp_path, file, again))
    assert report.fit_blocks == recorded[0][1].fit_blocks
    assert "720 answers occur more than once" in report.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "compact"}, "mode is 'compact', a fit wants 'static'"),
        ({"calibration": (1.5, 1.0)}, r"calibration is \(1\.5, 1\.0\), a fit wants None"),
        ({"temperature": 0.7}, r"temperature is 0\.7, wanted one of \[1\.0\]"),
        ({"target": "other"}, "target is 'other', wanted 'chatty'"),
        ({"drafter": "other"}, "drafter is 'other', wanted 'chatty-drafter'"),
        ({"template_sha256": "00"}, "template_sha256 is '00', wanted"),
        ({"drafter_sha256": "00"}, "drafter_sha256 is '00', wanted"),
    ],
)
def test_records_that_do_not_belong_are_refused(job, recorded, tmp_path, change, message):
    records = read_records(recorded[1] / "records-T1.jsonl")
    file, odd = tmp_path / "even.jsonl", tmp_path / "odd.jsonl"
    for path, changes in ((file, {}), (odd, change)):
        source = dataclasses.replace(records.source, **changes)
        write_records(path, Records(source, records.answers[:40]))
    with pytest.raises(ValueError, match=r"odd\.jsonl: " + message):
        run_calibration(from_files(job, tmp_path, file, odd))
    assert not (tmp_path / "refit").exists()


def test_a_temperature_without_records_is_named(job, recorded, tmp_path):
    config = from_files(job, tmp_path, recorded[1] / "records-T1.jsonl", temperatures=(1.0, 0.3))
    with pytest.raises(ValueError, match=r"no records at temperature 0\.3; the files have \[1\.0"):
        run_calibration(config)


TABLE = {
    "target": {"name": "t"},
    "drafter": {"name": "d"},
    "fit": {"temperatures": [1.0]},
    "output": {"folder": "f"},
    "collect": {"prompts": ["p"], "max_new_tokens": 4, "max_context": 8},
}


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("records", {"files": ["x"]}, "one of the sections collect and records"),
        ("fit", {"temperatures": []}, r"fit.temperatures are \[\]"),
        ("fit", {"temperatures": [1.0, 1.0]}, "all different"),
        ("fit", {"temperatures": [-1.0]}, r"fit.temperatures holds -1\.0"),
        ("fit", {"test_fraction": 1.0}, r"fit.test_fraction is 1\.0"),
        ("fit", {"method": "guess"}, "method is 'guess'"),
        ("fit", {"grid": 5}, "unknown key 'grid'"),
        ("output", {"sglang_temperature": 0.0}, r"sglang_temperature is 0\.0; wanted one of"),
        ("collect", {"prompts": []}, "collect.prompts is empty"),
        ("collect", {"batch": 0}, "collect.batch is 0"),
        ("collect", {"seed": -1}, "collect.seed is -1"),
        ("collect", {"top_p": 0.0}, r"collect.top_p is 0\.0"),
        ("collect", {"max_new_tokens": 8}, "max_new_tokens 8 must be below"),
    ],
)
def test_configs_out_of_range_are_refused_by_name(section, changes, message):
    from_table(TABLE, CalibrateConfig, "ok.toml")
    table = {**TABLE, section: {**TABLE.get(section, {}), **changes}}
    with pytest.raises(ValueError, match=message):
        from_table(table, CalibrateConfig, "bad.toml")


def test_the_shipped_config_is_valid():
    from train.config import read_config

    path = Path(__file__).parents[2] / "configs" / "smollm2-135m-calibrate.toml"
    assert read_config(path, CalibrateConfig).fit.temperatures == (0.0, 1.0)
