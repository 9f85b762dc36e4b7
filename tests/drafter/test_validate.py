"""Drafters that contradict themselves or their target are refused with both values."""

import dataclasses
from types import SimpleNamespace

import pytest

from dspark_jax.drafter import DrafterMismatch, check_block_size, check_fits

TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=12, vocab_size=32)


@pytest.fixture
def config(make_drafter):
    return make_drafter().config


def test_a_fitting_drafter_passes(config):
    check_fits(config, TARGET, {"stop": (2,), "pad": (0,)})
    check_fits(dataclasses.replace(config, target_layer_ids=(-1, 2)), TARGET)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (1, 3)}, ["target_layer_ids", "3", "final layer", "4 layers"]),
        ({"target_layer_ids": (1, 7)}, ["target_layer_ids", "7", "-1 to 2"]),
        ({"target_layer_ids": (-2, 1)}, ["target_layer_ids", "-2", "-1 to 2"]),
        ({"target_layer_ids": ()}, ["target_layer_ids", "empty"]),
        ({"target_layer_ids": (1, 1)}, ["[1, 1]", "twice"]),
        ({"num_target_layers": 6}, ["num_target_layers", "6", "4"]),
        ({"target_hidden_size": 20}, ["target_hidden_size", "20", "12"]),
        ({"vocab_size": 40, "draft_vocab_size": 40}, ["vocab_size", "40", "32"]),
        ({"draft_vocab_size": 33}, ["draft_vocab_size", "33", "32"]),
        ({"mask_token_id": 32}, ["mask_token_id", "32", "0 to 31"]),
        ({"mask_token_id": -1}, ["mask_token_id", "-1", "0 to 31"]),
        ({"mask_token_id": 2}, ["mask_token_id", "2", "stop"]),
        ({"mask_token_id": 0}, ["mask_token_id", "0", "pad"]),
        ({"block_size": 0}, ["block_size", "0", "at least 1"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank is 0"]),
        ({"markov_head_type": "lstm"}, ["lstm", "vanilla, gated, rnn"]),
    ],
)
def test_a_misfit_names_the_thing_and_both_values(config, changes, words):
    with pytest.raises(DrafterMismatch) as caught:
        check_fits(dataclasses.replace(config, **changes), TARGET, {"stop": (2,), "pad": (0,)})
    for word in words:
        assert word in str(caught.value)


def test_every_misfit_is_named_at_once(config):
    wrong = dataclasses.replace(config, target_hidden_size=20, num_target_layers=9)
    with pytest.raises(DrafterMismatch, match=r"num_target_layers is 9.*target_hidden_size is 20"):
        check_fits(wrong, TARGET)


def test_a_block_larger_than_trained_is_refused_with_both_sizes():
    for size in range(1, 8):
        check_block_size(size, 7)
    with pytest.raises(ValueError, match=r"block size 8.*trained with 7"):
        check_block_size(8, 7)
    with pytest.raises(ValueError, match=r"block size 0"):
        check_block_size(0, 7)
