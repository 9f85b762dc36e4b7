"""Counting accepted drafts, and telling looping answers."""

import pytest

from benchmarks.quality import generated_figures, is_looping, whole_steps
from dspark_jax.decode.request import Completion


def completion(windows, accepted, commits, finish_reason):
    return Completion(
        prompt_ids=(1,),
        token_ids=tuple(range(sum(commits))),
        text=None,
        finish_reason=finish_reason,
        windows=tuple(windows),
        accepted=tuple(accepted),
        commits=tuple(commits),
        logprobs=None,
    )


@pytest.mark.parametrize("period", [1, 3, 16])
def test_a_tail_that_repeats_is_a_loop(period):
    assert is_looping([*range(100, 200), *(list(range(period)) * 48)[:48]])


def test_a_longer_period_a_late_start_and_a_short_answer_are_no_loops():
    assert not is_looping(list(range(17)) * 5)
    assert not is_looping([*range(100), *([7] * 47)])
    assert not is_looping([7] * 47)


def test_a_stop_inside_a_block_counts_the_drafts_up_to_it_and_no_bonus():
    done = completion([7, 7], [1, 6], [2, 3], "stop")
    (_, last) = whole_steps(done, 7, 256)
    assert (last.proposed, last.accepted, last.committed) == (3, 3, 3)


def test_steps_cut_short_by_the_length_limit_are_left_out():
    done = completion([7, 5, 1], [3, 3, 1], [4, 4, 2], "length")
    assert [step.committed for step in whole_steps(done, 7, 10)] == [4]


def test_acceptance_is_conditional_on_the_drafts_before():
    done = completion([3, 3, 3, 3], [0, 1, 3, 3], [1, 2, 4, 4], "length")
    found = generated_figures([done], 3, 256)
    assert found["accepted_length"] == pytest.approx(11 / 4)
    assert found["accepted_length_after_first"] == pytest.approx(10 / 3)
    assert found["conditional_acceptance"] == pytest.approx([3 / 4, 2 / 3, 1])
