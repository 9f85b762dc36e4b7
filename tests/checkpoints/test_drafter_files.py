"""Drafter checkpoints: exact round trips, strict reading, borrowed tables."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.drafter import find_drafter, load_drafter, save_drafter
from dspark_jax.checkpoints.resolve import load_target

GOLDEN = Path(__file__).parent.parent / "golden"
DEEPSPEC = ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash_rank0"]
SPECULATORS = ["speculators_pruned", "speculators_full"]


@pytest.fixture(scope="module")
def target():
    loaded = load_target(GOLDEN / "qwen3_tiny", jnp.float32)
    return loaded.config, loaded.weights


@pytest.fixture
def mutilate(tmp_path):
    """A copy of a golden drafter whose tensors and config ``change`` has altered in place."""

    def copy(name, change):
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(GOLDEN / name / file, tmp_path / file)
        raw = json.loads((tmp_path / "config.json").read_text())
        tensors = load_file(tmp_path / "model.safetensors")
        change(raw, tensors)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [(name, "deepspec") for name in DEEPSPEC]
    + [(name, "speculators") for name in [*DEEPSPEC, *SPECULATORS]],
)
def test_a_written_drafter_reads_back_bit_for_bit(target, tmp_path, name, dialect):
    drafter = load_drafter(GOLDEN / name, target)
    save_drafter(drafter.config, drafter.weights, tmp_path, target, dialect=dialect)
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config
    assert_same(again.weights, drafter.weights)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("dspark_rnn", "deepspec")] + [(name, "speculators") for name in SPECULATORS],
)
def test_rewriting_a_file_keeps_every_tensor_of_it(target, tmp_path, name, dialect):
    drafter = load_drafter(GOLDEN / name, target)
    save_drafter(drafter.config, drafter.weights, tmp_path, target, dialect=dialect)
    before = load_file(GOLDEN / name / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        np.testing.assert_array_equal(value, after[key])


def test_bf16_survives_a_round_trip(target, tmp_path):
    drafter = load_drafter(GOLDEN / "dspark_gated", target, jnp.bfloat16)
    assert drafter.weights.fc.dtype == jnp.bfloat16
    for dialect in ("deepspec", "speculators"):
        save_drafter(drafter.config, drafter.weights, tmp_path, target, dialect=dialect)
        assert_same(load_drafter(tmp_path, target).weights, drafter.weights)


def test_what_equals_the_targets_is_left_out_of_one_dialect_and_stored_in_the_other(
    target, tmp_path
):
    drafter = load_drafter(GOLDEN / "speculators_full", target)
    assert drafter.weights.embed is None
    assert drafter.weights.lm_head is None
    save_drafter(drafter.config, drafter.weights, tmp_path / "full", target, dialect="deepspec")
    full = load_drafter(tmp_path / "full", target)
    np.testing.assert_array_equal(full.weights.embed, target[1].embed)
    np.testing.assert_array_equal(full.weights.lm_head, target[1].head)
    save_drafter(full.config, full.weights, tmp_path / "slim", target, dialect="speculators")
    slim = load_drafter(tmp_path / "slim", target)
    assert_same(slim.weights, drafter.weights)


def test_absolute_ids_come_from_offsets(target):
    drafter = load_drafter(GOLDEN / "speculators_pruned", target)
    file = load_file(GOLDEN / "speculators_pruned" / "model.safetensors")
    ids = np.asarray(drafter.weights.draft_to_target)
    np.testing.assert_array_equal(ids, np.arange(64) + file["d2t"])
    np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(file["t2d"]))


def test_deepspec_cannot_hold_a_pruned_vocabulary(target, tmp_path):
    drafter = load_drafter(GOLDEN / "speculators_pruned", target)
    with pytest.raises(ValueError, match=r"64 of 160"):
        save_drafter(drafter.config, drafter.weights, tmp_path, target, dialect="deepspec")
    assert not list(tmp_path.iterdir())


def test_three_mutilated_checkpoints_give_three_distinct_errors(target, mutilate):
    def without_head(_, tensors):
        del tensors["lm_head.weight"]

    def without_map(_, tensors):
        del tensors["d2t"]

    def larger_vocabulary(raw, tensors):
        raw["transformer_layer_config"]["vocab_size"] = 200
        tensors["markov_head.markov_w1.weight"] = np.zeros((200, 8), np.float32)
        tensors["t2d"] = np.pad(tensors["t2d"], (0, 40))

    for change, words in (
        (without_head, ["lm_head.weight", "head cannot be borrowed", "64", "160"]),
        (without_map, ["d2t", "which 64 of 160 tokens"]),
        (larger_vocabulary, ["embed_tokens.weight", "embedding cannot be borrowed", "200", "160"]),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            load_drafter(mutilate("speculators_pruned", change), target)
        for word in words:
            assert word in str(caught.value)


def test_every_faulty_tensor_is_named_in_one_error(target, mutilate):
    def change(_, tensors):
        tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["surprise"] = np.zeros(3, np.float32)
        del tensors["norm.weight"]
        del tensors["markov_head.markov_w2.weight"]
        tensors["fc.weight"] = np.zeros((48, 95), np.float32)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_drafter(mutilate("dspark_gated", change), target)
    for word in (
        "missing tensors: markov_head.markov_w2.weight, norm.weight",
        "unknown tensors: layers.0.self_attn.q_proj.bias, surprise",
        "fc.weight is [48, 95], wanted [48, 96]",
    ):
        assert word in str(caught.value)


def test_a_missing_confidence_bias_is_missing(target, mutilate):
    with pytest.raises(ValueError, match=r"missing tensors: confidence_head.proj.bias"):
        load_drafter(
            mutilate("dspark_gated", lambda _, t: t.pop("confidence_head.proj.bias")), target
        )


def test_prefixed_and_aliased_names_load(target, mutilate):
    wanted = load_drafter(GOLDEN / "dspark_gated", target)

    def change(_, tensors):
        for name in list(tensors):
            tensors["model." + name.replace("head.proj.", "head.")] = tensors.pop(name)

    assert_same(load_drafter(mutilate("dspark_gated", change), target).weights, wanted.weights)


def test_two_spellings_of_one_tensor_are_refused(target, mutilate):
    def change(_, tensors):
        tensors["model.norm.weight"] = tensors["norm.weight"]

    with pytest.raises(ValueError, match=r"norm.weight and .*norm.weight are two spellings"):
        load_drafter(mutilate("dspark_gated", change), target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].__setitem__(5, 500), r"column 5 to token 505; the vocabulary"),
        (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), r"64 columns to only 63 tokens"),
        (lambda t: t["t2d"].__setitem__(slice(None), True), r"d2t and t2d disagree on 96 tokens"),
    ],
)
def test_vocabulary_maps_that_contradict_themselves_are_refused(target, mutilate, change, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(mutilate("speculators_pruned", lambda _, t: change(t)), target)


def test_a_mask_token_that_ends_answers_is_refused(target, mutilate):
    with pytest.raises(ValueError, match=r"mask_token_id is 159.*stop token"):
        load_drafter(GOLDEN / "dspark_gated", target, stop_token_ids=(2, 159))
    with pytest.raises(ValueError, match=r"mask_token_id is 159.*pad token"):
        load_drafter(mutilate("dspark_gated", lambda r, _: r.update(pad_token_id=159)), target)


def test_a_drafter_of_another_target_is_refused_with_both_values(target, mutilate):
    path = mutilate("dspark_gated", lambda raw, _: raw.update(num_target_layers=9))
    with pytest.raises(ValueError, match=r"num_target_layers is 9, the target has 4"):
        load_drafter(path, target)


def test_a_name_nobody_ships_lists_what_is_shipped(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'no-such-drafter'.*ships"):
        find_drafter("no-such-drafter")
    with pytest.raises(FileNotFoundError, match=r"no folder with a config\.json"):
        find_drafter(tmp_path)
    assert find_drafter(GOLDEN / "dspark_rnn") == GOLDEN / "dspark_rnn"
