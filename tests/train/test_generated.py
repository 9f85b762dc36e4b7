"""Counting accepted drafts, looping answers, thresholds and calibration, by hand."""

import numpy as np
import pytest

from dspark_jax.decode.request import Completion
from train.generated import Step, generated_figures, is_looping, threshold_figures, whole_steps


def logit(*probabilities):
    return tuple(float(np.log(p / (1 - p))) for p in probabilities)


def completion(windows, accepted, commits, finish_reason, logits=None):
    return Completion(
        prompt_ids=(1,),
        token_ids=tuple(range(sum(commits))),
        text=None,
        finish_reason=finish_reason,
        windows=tuple(windows),
        accepted=tuple(accepted),
        commits=tuple(commits),
        logprobs=None,
        confidence_logits=logits,
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


def test_a_position_that_no_step_reached_has_no_acceptance():
    found = generated_figures([completion([3, 3], [0, 1], [1, 2], "length")], 3, 256)
    assert found["conditional_acceptance"] == [0.5, 0.0, None]
    assert found["reached"] == [2, 1, 0]


STEPS = [
    Step(proposed=3, accepted=2, committed=3, logits=logit(0.9, 0.75, 0.4)),
    Step(proposed=3, accepted=0, committed=1, logits=logit(0.6, 0.95, 0.95)),
    Step(proposed=3, accepted=3, committed=4, logits=logit(0.9, 0.9, 0.9)),
]


def test_a_threshold_cuts_each_block_before_its_first_low_confidence():
    rows = {row["threshold"]: row for row in threshold_figures(STEPS)}
    assert rows[0.0] == {
        "threshold": 0.0,
        "acceptance": pytest.approx(5 / 9),
        "tokens_a_step": pytest.approx(8 / 3),
        "verified": 3.0,
    }
    # 0.5: two, three and three drafts are kept, of which 2, 0 and 3 are accepted
    assert rows[0.5]["acceptance"] == pytest.approx(5 / 8)
    assert rows[0.5]["tokens_a_step"] == pytest.approx(8 / 3)
    # 0.8: one, none and three; a later confident draft does not come back
    assert rows[0.8]["acceptance"] == pytest.approx(4 / 4)
    assert rows[0.8]["verified"] == pytest.approx(4 / 3)
    assert rows[0.8]["tokens_a_step"] == pytest.approx((2 + 1 + 4) / 3)


def test_a_threshold_that_keeps_no_draft_leaves_one_token_a_step_and_no_share():
    low = [Step(2, 1, 2, logit(0.1, 0.1))]
    row = threshold_figures(low)[-1]
    assert (row["acceptance"], row["tokens_a_step"], row["verified"]) == (None, 1.0, 0.0)


def test_a_step_that_ended_in_an_accepted_stop_gains_no_bonus_from_a_threshold():
    stopped = [Step(2, 2, 2, logit(0.9, 0.9))]
    assert threshold_figures(stopped)[0]["tokens_a_step"] == 2.0


def test_a_confidence_that_is_no_number_is_below_every_threshold_but_0():
    rows = threshold_figures([Step(2, 1, 2, (float("nan"), 3.0))])
    assert [row["verified"] for row in rows] == [2.0] + [0.0] * 9


def test_temperatures_move_the_thresholds_and_the_calibration_after_but_not_before():
    rows = threshold_figures(STEPS, (1e9, 1.0, 1.0))
    assert rows[5]["verified"] == pytest.approx(8 / 3)
    assert rows[6]["verified"] == 0
    answers = [
        completion([3, 3], [2, 0], [3, 1], "length", (logit(0.9, 0.75, 0.4), logit(0.6, 0.5, 0.5)))
    ]
    plain = generated_figures(answers, 3, 256)
    scaled = generated_figures(answers, 3, 256, (2.0, 1.0, 1.0))
    first = plain["calibration"][0]
    assert first["brier_before"] == pytest.approx((0.1**2 + 0.6**2) / 2)
    assert first["brier_after"] is None
    assert first["auroc_before"] == 1.0
    assert "thresholds_calibrated" not in plain
    assert scaled["calibration"][0]["brier_before"] == first["brier_before"]
    assert scaled["calibration"][0]["brier_after"] != first["brier_before"]
    assert scaled["thresholds"] == plain["thresholds"]


def test_answers_without_confidences_have_lengths_only():
    found = generated_figures([completion([3], [1], [2], "length")], 3, 256)
    assert "thresholds" not in found
    assert "calibration" not in found
