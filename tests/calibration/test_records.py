"""Record files: written, read, refused, split by prompt."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.calibration.records import (
    AnswerRecord,
    Records,
    Source,
    check_fittable,
    check_same_source,
    prompt_key,
    read_records,
    split_by_prompt,
    stack_blocks,
    without_repeats,
    write_records,
)

SOURCE = Source(
    target="t",
    drafter="d",
    drafter_sha256="00",
    block_size=2,
    drafted=2,
    mode="static",
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    template_sha256="ff",
    calibration=None,
)


def answer(prompt, *steps):
    logits, accepted, verified = zip(*steps, strict=True)
    return AnswerRecord(prompt, logits, accepted, verified)


ANSWERS = (
    answer("a", ((0.1, -2.0), 1, 2), ((float(np.float32(1 / 3)), 4.0), 2, 2)),
    answer("b", ((1.5, 2.5), 0, 1)),
)


def test_a_file_survives_writing_and_reading_to_the_last_bit(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, Records(SOURCE, ANSWERS))
    assert read_records(path) == Records(SOURCE, ANSWERS)
    calibrated = dataclasses.replace(SOURCE, calibration=(1.0, 2.0))
    write_records(path, Records(calibrated, ()))
    assert read_records(path) == Records(calibrated, ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is not a file of confidence records.*first line must hold"),
        ('{"entries": []}\n', "first line must hold"),
        ("not json\n", "is not a file of confidence records"),
        ('{"format": "dspark-confidence-records", "target": "t"}\n', "missing"),
    ],
)
def test_another_file_is_named(tmp_path, content, message):
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_records(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "logits": [[1.0, 2.0]], "accepted": [1]', "line 2"),
        ('{"prompt": "a", "logits": [[1, 2]], "accepted": [1], "verified": []}', "0 verified"),
        ('{"prompt": "a", "logits": [[1]], "accepted": [1], "verified": [1]}', "row has 1 logits"),
        ('{"prompt": "a", "logits": [], "accepted": []}', "'verified'"),
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path, line, message):
    path = tmp_path / "records.jsonl"
    write_records(path, Records(SOURCE, ()))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_records(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "compact"}, "x.jsonl: mode is 'compact', a fit wants 'static'"),
        ({"mode": "cap-accept"}, "mode is 'cap-accept'"),
        ({"drafted": 1}, "drafted is 1, a fit wants 2"),
        ({"calibration": (1.2, 1.1)}, r"calibration is \(1.2, 1.1\), a fit wants None"),
    ],
)
def test_records_that_are_trimmed_or_already_calibrated_are_refused(change, message):
    check_fittable(SOURCE, "x.jsonl")
    with pytest.raises(ValueError, match=message):
        check_fittable(dataclasses.replace(SOURCE, **change), "x.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, r"temperature is 0\.7, wanted 1\.0"),
        ({"target": "other"}, "target is 'other', wanted 't'"),
        ({"drafter": "other"}, "drafter is 'other', wanted 'd'"),
        ({"drafter_sha256": "11"}, "drafter_sha256 is '11', wanted '00'"),
        ({"template_sha256": None}, "template_sha256 is None, wanted 'ff'"),
        ({"top_p": 0.9}, r"top_p is 0\.9, wanted 1\.0"),
    ],
)
def test_records_of_something_else_are_refused(change, message):
    check_same_source(SOURCE, SOURCE, "x.jsonl")
    with pytest.raises(ValueError, match=r"x\.jsonl: " + message):
        check_same_source(dataclasses.replace(SOURCE, **change), SOURCE, "x.jsonl")


def test_no_prompt_is_on_both_sides_of_a_split_and_nothing_is_lost():
    answers = [answer(f"p{i % 20}", ((float(i), 0.0), 0, 2)) for i in range(100)]
    fit, test = split_by_prompt(answers, test_fraction=0.3, seed=0)
    assert {one.prompt for one in fit}.isdisjoint(one.prompt for one in test)
    assert len({one.prompt for one in test}) == 6
    assert sorted(map(json.dumps, map(dataclasses.asdict, fit + test))) == sorted(
        map(json.dumps, map(dataclasses.asdict, answers))
    )
    again = split_by_prompt(answers[::-1], test_fraction=0.3, seed=0)
    assert set(again[1]) == set(test)
    assert set(split_by_prompt(answers, test_fraction=0.3, seed=1)[1]) != set(test)


def test_both_sides_of_a_split_have_a_prompt_or_it_is_refused():
    for fraction in (0.01, 0.99):
        fit, test = split_by_prompt(ANSWERS, test_fraction=fraction, seed=0)
        assert fit
        assert test
    with pytest.raises(ValueError, match="1 prompts cannot be split"):
        split_by_prompt(ANSWERS[:1], test_fraction=0.5, seed=0)
    with pytest.raises(ValueError, match=r"test_fraction is 1\.0"):
        split_by_prompt(ANSWERS, test_fraction=1.0, seed=0)


def test_an_answer_that_is_there_twice_counts_once():
    assert without_repeats([*ANSWERS, ANSWERS[0]]) == ANSWERS


def test_blocks_are_the_steps_of_all_answers():
    blocks = stack_blocks(ANSWERS, 2)
    assert blocks.logits.shape == (3, 2)
    assert blocks.accepted.tolist() == [1, 2, 0]
    assert blocks.verified.tolist() == [2, 2, 1]
    assert len(stack_blocks([], 2)) == 0


def test_a_prompt_is_named_by_its_tokens():
    assert prompt_key([1, 2]) == prompt_key((1, 2)) != prompt_key([1, 2, 0])
