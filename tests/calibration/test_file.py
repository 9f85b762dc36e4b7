"""Calibration files: reading, refusing, choosing the entry of a request."""

import json

import numpy as np
import pytest

from dspark_jax.calibration.file import (
    identity,
    load_calibration,
    save_calibration,
    save_sglang,
)
from dspark_jax.calibration.nearest import nearest_temperatures

ENTRIES = {
    "entries": [
        {"temperature": 1.0, "temperatures": [1.5, 2.0], "num_samples": 500},
        {
            "temperature": 0,
            "temperatures": [1.0, 1.25],
            "ece_before": [0.1, 0.2],
            "ece_after": [0.01, 0.02],
        },
    ]
}


def load(tmp_path, data, block_size=2):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(data))
    return load_calibration(path, block_size=block_size)


def test_entries_are_ordered_by_sampling_temperature(tmp_path):
    keys, temperatures = load(tmp_path, ENTRIES).rows()
    np.testing.assert_array_equal(keys, np.float32([0.0, 1.0]))
    np.testing.assert_array_equal(temperatures, np.float32([[1.0, 1.25], [1.5, 2.0]]))


def test_a_file_survives_writing_and_reading(tmp_path):
    calibration = load(tmp_path, ENTRIES)
    path = tmp_path / "again.json"
    save_calibration(calibration, path)
    assert load_calibration(path, block_size=2) == calibration


def test_a_single_entry_file_is_read_as_greedy(tmp_path):
    calibration = load(tmp_path, {"temperatures": [1.0, 2.0], "dataset": "x", "num_samples": 9})
    assert calibration.entries[0].temperature == 0
    assert calibration.entries[0].num_samples == 9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"temperatures": [1.0, 2.0, 3.0]}, "has 3 values.*block size is 2"),
        ({"temperatures": [1.0, 0.0]}, r"must be above 0, found \[1.0, 0.0\]"),
        ({"temperatures": [1.0, float("nan")]}, "must be above 0"),
        ({"entries": []}, "different temperatures"),
        ({"entries": [{"temperature": 1}]}, "lacks temperatures"),
        ({"entries": [{"temperatures": [1.0, 1.0]}]}, "lacks temperature"),
        ({"entries": [{"temperature": -1, "temperatures": [1.0, 1.0]}]}, "temperature is -1"),
        ({"entries": [ENTRIES["entries"][0]] * 2}, r"different temperatures, found \[1.0, 1.0\]"),
        ({"entries": None}, "entries is None; wanted a list"),
        ({"entries": [3]}, "an entry is 3; wanted an object"),
        ({"temperatures": 1.5}, "temperatures is 1.5; wanted a list of numbers"),
        ({"temperatures": [1.0, "hot"]}, "temperatures holds 'hot'; wanted a number"),
        ({"temperature": None, "temperatures": [1.0, 1.0]}, "temperature holds None"),
        ({"other": 1}, "neither entries nor temperatures"),
        ({"temperatures": [1.0, 1.0], "ece_after": [0.1]}, "ece_after.*has 1 values"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, data)


@pytest.mark.parametrize(
    ("temperature", "nearest"), [(0.0, 0.0), (0.3, 0.0), (0.5, 0.0), (0.6, 1.0), (2.0, 1.0)]
)
def test_host_and_device_pick_the_same_nearest_entry(tmp_path, temperature, nearest):
    calibration = load(tmp_path, ENTRIES)
    keys, temperatures = calibration.rows()
    entry = calibration.nearest(temperature)
    assert entry.temperature == nearest
    row = nearest_temperatures(temperatures, keys, np.float32([temperature]))
    np.testing.assert_array_equal(row[0], np.float32(entry.temperatures))


def test_a_distant_match_says_which_entry_it_fell_back_on(tmp_path):
    calibration = load(tmp_path, ENTRIES)
    assert calibration.distant(0.0) is None
    assert calibration.distant(1.1) is None
    assert "temperature 0.6 use the calibration fitted at temperature 1" in calibration.distant(0.6)
    # Greedy acceptance is another event than sampled acceptance, however low the temperature.
    assert "fitted at temperature 0" in calibration.distant(0.1)


def test_the_identity_leaves_confidences_alone():
    keys, temperatures = identity(7).rows()
    assert keys.tolist() == [0.0]
    assert temperatures.tolist() == [[1.0] * 7]


def test_a_file_tells_what_it_was_made_with_and_reads_the_same(tmp_path):
    calibration = load(tmp_path, ENTRIES)
    path = tmp_path / "told.json"
    save_calibration(calibration, path, made_with={"drafter": "d"})
    assert json.loads(path.read_text())["made_with"] == {"drafter": "d"}
    assert load_calibration(path, block_size=2) == calibration


def test_sglangs_shape_is_written_and_read_back(tmp_path):
    entry = load(tmp_path, ENTRIES).entries[0]
    path = tmp_path / "sglang.json"
    save_sglang(entry, path, dataset="prompts.jsonl")
    assert json.loads(path.read_text()) == {
        "temperatures": [1.0, 1.25],
        "dataset": "prompts.jsonl",
        "ece_before": [0.1, 0.2],
        "ece_after": [0.01, 0.02],
    }
    assert load_calibration(path, block_size=2).entries == (entry,)
