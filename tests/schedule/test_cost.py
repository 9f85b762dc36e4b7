"""Cost tables: reading, refusing, and pricing every token count of an engine."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.calibration.file import Calibration, CalibrationEntry
from dspark_jax.schedule.cost import (
    MeasuredCosts,
    beside_prompts,
    load_costs,
    no_costs,
    with_calibration,
)

SESSION = {"device": "cpu", "model": "toy", "dtype": "float32", "block_size": 3}
TABLE = {
    **SESSION,
    "contexts": [0, 100],
    "verify": {"tokens": [1, 4, 8], "seconds": [[1.0, 2.0], [1.5, 2.5], [3.0, 4.0]]},
    "draft": {"requests": [1, 2], "seconds": [[0.5, 0.6], [0.7, 0.8]]},
    "largest_bucket": 8,
}


TIERS = {
    **SESSION,
    "tiers": [
        {
            "requests": 2,
            "contexts": [0, 100],
            "largest_bucket": 8,
            "verify": {"tokens": [2, 8, 16], "seconds": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
            "draft": [0.5, 0.6],
        },
        {
            "requests": 4,
            "contexts": [0],
            "largest_bucket": 16,
            "verify": {"tokens": [4, 8, 16], "seconds": [[2.0], [1.0], [7.0]]},
            "draft": [0.9],
        },
    ],
}


def write(path, table):
    file = path / "costs.json"
    file.write_text(json.dumps(table))
    return file


def load(path, table, **changes):
    session = {"slots": 2, "buckets": None, **SESSION, **changes}
    return load_costs(write(path, table), **session)


def measured(points, largest):
    sizes, seconds = zip(*points, strict=True)
    return MeasuredCosts(np.array(sizes), np.array(seconds, float)[:, None], largest)


def test_noise_is_levelled_and_padding_is_paid_for_inside_buckets():
    cost = measured([(8, 10), (16, 9), (32, 14)], largest=32)
    assert cost.at(np.array([16, 9, 17, 1, 32])).tolist() == [[10, 10, 14, 10, 14]]


def test_beyond_the_largest_bucket_costs_are_linear_among_the_points_beyond_it():
    cost = measured([(8, 10), (16, 12), (24, 20), (40, 28)], largest=16)
    # 17 to 24: no line from (16, 12), a bucket's cost, into the unpadded points.
    assert cost.at(np.array([16, 17, 24, 32, 40])).tolist() == [[12, 20, 20, 24, 28]]


def test_past_the_last_point_costs_follow_the_last_slope():
    beyond = measured([(8, 10), (24, 20), (40, 28)], largest=8)
    assert beyond.at(np.array([48, 56])).tolist() == [[32, 36]]
    only_buckets = measured([(8, 10), (16, 14)], largest=16)
    assert only_buckets.at(np.array([16, 24])).tolist() == [[14, 18]]
    one_point = measured([(8, 10)], largest=8)
    assert one_point.at(np.array([4, 8, 16])).tolist() == [[10, 10, 20]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 10)), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_costs_never_fall_as_tokens_are_added(points, largest):
    points = sorted(dict(points).items())
    found = measured(points, largest).at(np.arange(100))
    assert (np.diff(found) >= -1e-12).all()
    assert (found > 0).all()


def test_a_table_is_laid_out_for_every_count_the_engine_can_run(tmp_path):
    found = load(tmp_path, TABLE)
    assert bool(found.known)
    np.testing.assert_allclose(found.contexts, [0, 100])
    np.testing.assert_allclose(found.verify[0], [1, 1, 1.5, 1.5, 1.5, 3, 3, 3, 3])
    np.testing.assert_allclose(found.verify[1], [2, 2, 2.5, 2.5, 2.5, 4, 4, 4, 4])
    np.testing.assert_allclose(found.draft, [[0.5, 0.5, 0.7], [0.6, 0.6, 0.8]])
    np.testing.assert_array_equal(found.temperatures, np.ones((1, 3)))


def test_the_engines_own_buckets_decide_what_a_count_costs(tmp_path):
    found = load(tmp_path, TABLE, buckets=(2, 8))
    np.testing.assert_allclose(found.verify[0], [1.5, 1.5, 1.5, 3, 3, 3, 3, 3, 3])


def test_a_step_is_priced_by_the_tier_that_holds_its_requests(tmp_path):
    two = load(tmp_path, TIERS)
    np.testing.assert_allclose(two.verify, [[1, 1, 1, *[3] * 6], [2, 2, 2, *[4] * 6]])
    np.testing.assert_allclose(two.draft[:, 2], [0.5, 0.6])
    np.testing.assert_allclose(two.contexts, [0, 100])
    for slots in (3, 4):
        found = load(tmp_path, TIERS, slots=slots)
        np.testing.assert_allclose(found.verify[0, 8], 2.0, err_msg="eight rows, levelled")
        np.testing.assert_allclose(found.draft[0, slots], 0.9)
        np.testing.assert_allclose(found.contexts, [0])


def test_more_requests_than_any_tier_holds_go_on_beyond_the_largest(tmp_path):
    found = load(tmp_path, TIERS, slots=8)
    np.testing.assert_allclose(found.verify[0, [16, 24, 32]], [7, 12, 17])
    np.testing.assert_allclose(found.draft[0, [4, 8]], [0.9, 1.8])


def test_rows_of_prompts_are_paid_for_without_padding(tmp_path):
    found = load(tmp_path, TIERS, buckets=(2, 8), prompt_rows=8)
    # 10 and 16 rows, of which 8 are of prompts: between the points of 8 and 16
    np.testing.assert_allclose(found.verify[0], [3.5] * 3 + [5.0] * 6)


def test_rows_of_prompts_are_paid_for_in_tables_held_in_memory_as_well(tmp_path):
    stairs = load(tmp_path, TABLE)
    found = beside_prompts(stairs, 6)
    np.testing.assert_array_equal(found.verify[:, :3], stairs.verify[:, 6:])
    # a row beyond the last stair costs what a row costs on average, (3 - 1) / 8
    np.testing.assert_allclose(found.verify[0, 3:], 3 + np.arange(1, 7) / 4)
    np.testing.assert_array_equal(found.draft, stairs.draft)
    assert beside_prompts(stairs, 0) is stairs


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "requests of tiers must be a list that increases from 1"),
        ({}, "tiers is {}; wanted a list of objects"),
        ([3], "wanted an object that holds requests, found 3"),
        (TIERS["tiers"][::-1], "requests of tiers must be .*found \\[4, 2\\]"),
        ([{**TIERS["tiers"][0], "draft": [0.5]}], r"draft has shape \(1, 1\).*\(1, 2\)"),
        ([{**TIERS["tiers"][0], "draft": 0.5}], "draft is .*; wanted a list of lists"),
        ([{"requests": 2, "contexts": [0], "draft": [1]}], "verify is missing"),
    ],
)
def test_a_malformed_tier_is_refused(tmp_path, tiers, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {**TIERS, "tiers": tiers})


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "NVIDIA H200"), ("model", "other"), ("dtype", "bfloat16"), ("block_size", 7)],
)
def test_a_table_measured_for_something_else_is_refused_naming_both(tmp_path, name, value):
    with pytest.raises(ValueError, match=name) as error:
        load(tmp_path, {**TABLE, name: value})
    assert repr(value) in str(error.value)
    assert repr(SESSION[name]) in str(error.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("verify", "tokens"), [1, 8, 4], "verify.tokens must be a list that increases"),
        (("verify", "tokens"), [0, 4, 8], "increases from 1"),
        (("verify", "seconds"), [[1.0], [1.5], [3.0]], r"shape \(3, 1\).*\(3, 2\)"),
        (("draft", "seconds"), [[0.5, 0.6], [0.0, 0.8]], "finite and above 0"),
        (("draft", "requests"), [], "draft.requests"),
        (("contexts",), [100, 0], "contexts"),
        (("contexts",), "many", "contexts is 'many'; wanted a list of numbers"),
        (("verify",), None, "wanted an object that holds tokens, found None"),
        (("verify", "tokens"), [1, "b"], r"verify.tokens is \[1, 'b'\]; wanted a list of numbers"),
        (("verify", "seconds"), [[1], [2, 3]], "verify.seconds is .*; wanted a list of lists"),
        (("draft", "requests"), {}, "draft.requests is {}; wanted a list of numbers"),
        (("largest_bucket",), "big", "largest_bucket is 'big'; wanted a number"),
        (("largest_bucket",), 0, "largest_bucket is 0, wanted 1 or more"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path, place, value, message):
    table = copy.deepcopy(TABLE)
    inner = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        load(tmp_path, table)


def test_a_missing_field_is_named(tmp_path):
    table = {name: value for name, value in TABLE.items() if name != "contexts"}
    with pytest.raises(ValueError, match="contexts is missing"):
        load(tmp_path, table)


def test_sglangs_floor_probe_table_prices_a_whole_step(tmp_path):
    table = {
        "sample_batch_tokens": [2, 4],
        "sample_steps_per_sec": [10.0, 5.0],
        "max_batch_tokens": 8,
    }
    found = load(tmp_path, table)
    np.testing.assert_allclose(found.verify[0], [0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2])
    np.testing.assert_array_equal(found.draft, np.zeros((1, 3)))


def test_sglangs_additive_table_is_split_into_draft_and_verify(tmp_path):
    table = {
        "bias_seconds": 1.0,
        "bs_probes": [1, 2],
        "alpha_seconds": [0.25, 0.5],
        "m_probes": [2, 6],
        "theta_seconds": [0.0, 4.0],
    }
    found = load(tmp_path, table)
    np.testing.assert_allclose(found.verify[0], [1, 1, 1, 2, 3, 4, 5, 5, 5])
    np.testing.assert_allclose(found.draft, [[0.25, 0.25, 0.5]])
    with pytest.raises(ValueError, match="bias_seconds is 'a'; wanted a number"):
        load(tmp_path, {**table, "bias_seconds": "a"})
    with pytest.raises(ValueError, match="bias_seconds is 0"):
        load(tmp_path, {**table, "bias_seconds": 0})
    with pytest.raises(ValueError, match="alpha_seconds has 1 values for 2"):
        load(tmp_path, {**table, "alpha_seconds": [0.25]})


def test_calibrated_tables_carry_one_row_a_sampling_temperature():
    calibration = Calibration(
        (CalibrationEntry(0.0, (1.0, 2.0, 3.0)), CalibrationEntry(0.7, (1.5, 1.5, 1.5)))
    )
    found = with_calibration(no_costs(2, 3), calibration)
    np.testing.assert_allclose(found.temperature_keys, [0.0, 0.7])
    np.testing.assert_allclose(found.temperatures, [[1, 2, 3], [1.5, 1.5, 1.5]])
    assert not bool(found.known)
    with pytest.raises(ValueError, match=r"3 temperatures.*block size is 7"):
        with_calibration(no_costs(2, 7), calibration)


def test_a_shallower_walk_costs_its_share_and_depths_between_are_interpolated(tmp_path):
    table = copy.deepcopy(TIERS)
    table["tiers"][0]["walk"] = {"depths": [1, 3], "shares": [0.4, 1.0]}
    np.testing.assert_allclose(load(tmp_path, table).walk, [0.4, 0.7, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(load(tmp_path, TIERS).walk, np.ones(3))
    table["tiers"][0]["walk"] = {"depths": [1, 2], "shares": [0.4]}
    with pytest.raises(ValueError, match=r"walk\.shares has shape"):
        load(tmp_path, table)


def test_a_table_timed_for_fewer_drafts_than_a_block_prices_its_deepest_walk_in_full(tmp_path):
    table = copy.deepcopy(TIERS)
    table["tiers"][0]["walk"] = {"depths": [1, 2], "shares": [0.4, 1.0]}
    np.testing.assert_allclose(load(tmp_path, table).walk, [0.4, 1.0, 1.0], rtol=1e-6)
