"""Estimates against what is then on the disk."""

import numpy as np
import pytest

from train.data import TokenSequence
from train.estimate import Probe, check_room, duration, extrapolate, readable_bytes
from train.shards import shard_path, write_shard


def documents(count, seed):
    generator = np.random.default_rng(seed)
    found = []
    for length in generator.integers(100, 400, count):
        tokens = generator.zipf(1.3, length) % 49152
        found.append(TokenSequence(tokens.astype(np.int32), np.arange(length) > 50))
    return found


def test_a_sample_foretells_tokens_and_bytes_of_the_whole(tmp_path):
    sample, rest = documents(200, 0), documents(4000, 1)
    found = extrapolate(Probe(200, 3.0, sample), 4000, 1, 100)
    write_shard(tmp_path, 0, rest)
    assert found.shard_bytes == pytest.approx(shard_path(tmp_path, 0).stat().st_size, rel=0.1)
    assert found.tokens == pytest.approx(sum(len(one.tokens) for one in rest), rel=0.1)
    assert found.feature_bytes == 100 * found.tokens
    assert found.seconds == 60
    assert "4,000 conversations" in found.told()
    assert "about 60 s" in found.told()


def test_a_sample_that_was_partly_known_says_nothing_about_time():
    assert "time unknown" in extrapolate(Probe(2, None, documents(2, 0)), 4, 1, 0).told()


def test_a_sample_without_documents_estimates_nothing():
    assert extrapolate(Probe(2, 1.0, []), 4, 1, 10).tokens == 0


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path):
    check_room(tmp_path / "not" / "there", 1, "answers.output")
    with pytest.raises(ValueError, match=r"features\.output .* free .* needs about 5000\.0 TB"):
        check_room(tmp_path, 5 * 10**15, "features.output")


def test_times_and_sizes_read_well():
    assert [duration(seconds) for seconds in (30, 600, 36000)] == ["30 s", "10 min", "10.0 h"]
    sizes = [readable_bytes(count) for count in (12, 3e4, 5e13)]
    assert sizes == ["12 B", "30.0 kB", "50.0 TB"]
