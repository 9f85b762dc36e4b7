"""Arms in processes of their own wait for each other and are measured one at a time."""

import functools
import json
import multiprocessing

import pytest

from dspark_jax.bench.apart import take_turns
from dspark_jax.bench.record import merge
from dspark_jax.cli.main import main
from tests.bench.turns import note


def test_all_are_ready_before_any_load_and_loads_go_round(tmp_path):
    log, arms, loads, measured = tmp_path / "log", ("a", "short", "b"), (1, 4), []
    work = functools.partial(note, log, loads)
    lost = take_turns(arms, loads, work, lambda: measured.append(1))
    assert lost == {"short": "its process ended with exit code 1"}
    lines = log.read_text().splitlines()
    assert sorted(lines[:3]) == ["a ready", "b ready", "short ready"]
    turns = [("a", 1), ("short", 1), ("b", 1), ("a", 4), ("b", 4)]
    assert lines[3:] == [
        f"{arm} {verb} {users}" for arm, users in turns for verb in ("begins", "ends")
    ]
    assert len(measured) == len(turns)


def test_an_arm_that_cannot_run_ends_all_before_anything_is_measured(tmp_path, capfd):
    log = tmp_path / "log"
    with pytest.raises(ValueError, match="arm late ended before its first load"):
        take_turns(("a", "late"), (1,), functools.partial(note, log, (1,)), lambda: None)
    assert "late: cannot run" in capfd.readouterr().err
    assert not log.exists() or log.read_text() == "a ready\n"
    assert not multiprocessing.active_children()


def entry(arm, users, rate):
    return {"arm": arm, "concurrency": users, "tokens_per_second": rate}


def test_what_arms_wrote_is_one_record_by_load(tmp_path):
    parts = [tmp_path / name for name in ("off.json", "compact.json", "nothing-yet.json")]
    plain = {"device": "toy", "cost_table": None}
    adaptive = plain | {"cost_table": "costs.json"}
    for part, facts, arm, rates in (
        (parts[0], plain, "off", (10.0, 20.0)),
        (parts[1], adaptive, "compact", (15.0, 40.0)),
    ):
        entries = [entry(arm, users, rate) for users, rate in zip((1, 4), rates, strict=True)]
        part.write_text(json.dumps(facts | {"arms": entries, "mixed_traffic": [], "verdicts": []}))
    out = tmp_path / "out.json"
    record = merge(out, parts)
    assert [(one["arm"], one["concurrency"]) for one in record.arms] == [
        ("off", 1),
        ("compact", 1),
        ("off", 4),
        ("compact", 4),
    ]
    assert [one["ratio_to_off"] for one in record.arms] == [1.0, 1.5, 1.0, 2.0]
    assert record.facts["cost_table"] == "costs.json"
    assert record.facts["apart"]
    assert "arms" not in record.facts
    assert json.loads(out.read_text())["arms"] == record.arms


def test_apart_wants_to_be_told_the_arms(tmp_path, capsys):
    flags = ["--target", "t", "--drafter", "d", "--prompts", "p.jsonl"]
    assert main(["bench", *flags, "--out", str(tmp_path / "out.json"), "--apart"]) == 2
    assert "--apart is given without --arms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arms", "says"),
    [(["off", "off"], "wanted each once"), (["compact"], "no --cost-table is given")],
)
def test_arms_that_cannot_run_apart_are_refused_before_any_is_started(tmp_path, capsys, arms, says):
    flags = ["--target", "t", "--drafter", "d", "--prompts", "p.jsonl", "--apart"]
    assert main(["bench", *flags, "--out", str(tmp_path / "out.json"), "--arms", *arms]) == 2
    assert says in capsys.readouterr().err
