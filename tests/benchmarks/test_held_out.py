"""The split of the prompt sets."""

import json

import pytest

from benchmarks import held_out

SIZES = {"gsm8k": 130, "math500": 101, "mbpp": 150, "humaneval": 4, "mt-bench": 3}


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        lines = (json.dumps({"turns": [f"{name} {i}", "and then?"]}) for i in range(size))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_last_hundred_lines_and_two_whole_sets_are_held_out(folder):
    sets = held_out.load(folder)
    assert {name: len(turns) for name, turns in sets.items()} == {
        "gsm8k": 100,
        "math500": 100,
        "mbpp": 100,
        "humaneval": 4,
        "mt-bench": 3,
    }
    assert sets["gsm8k"][0] == "gsm8k 30"
    assert sets["gsm8k"][-1] == "gsm8k 129"


def test_no_prompt_is_both_trained_on_and_held_out(folder):
    trained = {turn for turns in held_out.training(folder).values() for turn in turns}
    held = {turn for turns in held_out.load(folder).values() for turn in turns}
    assert not trained & held
    assert len(trained | held) == sum(SIZES.values())


def test_a_limit_applies_to_each_set(folder):
    assert [len(turns) for turns in held_out.load(folder, 2).values()] == [2] * 5


def test_a_set_too_small_to_hold_out_from_is_refused(folder):
    (folder / "mbpp.jsonl").write_text('{"turns": ["one"]}\n' * 100)
    with pytest.raises(ValueError, match="100 lines"):
        held_out.training(folder)


def test_interleaving_takes_from_every_set_in_turn():
    sets = {"a": ["a0", "a1", "a2"], "b": ["b0"]}
    assert held_out.interleave(sets) == ["a0", "b0", "a1", "a2"]
    assert held_out.interleave(sets, 3) == ["a0", "b0", "a1"]
    with pytest.raises(ValueError, match="5 were asked"):
        held_out.interleave(sets, 5)


def test_the_training_file_holds_one_prompt_a_line(folder, tmp_path, capsys):
    held_out.main(folder, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"turns": ["gsm8k 0"]}
    assert len(lines) == 30 + 1 + 50
