"""Every spelling of a drafter's config reads as the same thing, or is refused by name."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_jax.checkpoints.drafter_config import drafter_config, is_drafter, reserved_ids

GOLDEN = Path(__file__).parent.parent / "golden"
TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=48, vocab_size=160)


@pytest.fixture
def deepspec():
    return json.loads((GOLDEN / "dspark_vanilla" / "config.json").read_text())


@pytest.fixture
def speculators():
    raw = json.loads((GOLDEN / "speculators_pruned" / "config.json").read_text())
    raw["draft_vocab_size"] = 160
    return raw


def nested(raw, *names):
    """The same config with ``names`` moved under ``dflash_config``."""
    raw = copy.deepcopy(raw)
    raw["dflash_config"] = {name: raw.pop(name) for name in names}
    return raw


def test_three_spellings_are_one_config(deepspec, speculators):
    wanted = drafter_config(deepspec, "flat")
    assert wanted.target_layer_ids == (0, 1, 2)
    assert wanted.mask_token_id == 159
    assert wanted.rope_theta == 1e6
    assert drafter_config(speculators, "speculators", TARGET) == wanted
    under = nested(
        deepspec, "target_layer_ids", "mask_token_id", "block_size", "enable_confidence_head"
    )
    assert drafter_config(under, "nested") == wanted


def test_the_confidence_flag_is_found_wherever_it_stands(deepspec, speculators):
    for raw in (deepspec, speculators):
        assert drafter_config(raw, "top", TARGET).enable_confidence_head
        assert drafter_config(
            nested(raw, "enable_confidence_head"), "nested", TARGET
        ).enable_confidence_head
        raw["enable_confidence_head"] = False
        assert not drafter_config(raw, "off", TARGET).enable_confidence_head


def test_older_rope_spelling_reads_the_same(deepspec):
    wanted = drafter_config(deepspec, "new")
    del deepspec["rope_parameters"]
    deepspec |= {"rope_theta": 1e6, "rope_scaling": None}
    assert drafter_config(deepspec, "old") == wanted


def test_the_head_width_is_the_configs_not_hidden_over_heads(deepspec):
    deepspec |= {"head_dim": 128, "hidden_size": 640, "num_attention_heads": 8}
    assert drafter_config(deepspec, "wide").head_dim == 128
    del deepspec["head_dim"]
    with pytest.raises(ValueError, match="lacks head_dim"):
        drafter_config(deepspec, "unknown")


def test_a_sliding_window_is_honoured_in_every_spelling(deepspec, speculators):
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}
    assert drafter_config(deepspec | layers, "flat").sliding_window == 2048
    speculators["transformer_layer_config"] |= layers
    speculators["sliding_window_non_causal"] = True
    assert drafter_config(speculators, "nested", TARGET).sliding_window == 2048
    deepspec["dflash_config"] = {"sliding_window": 2048, "use_sliding_window": True}
    for name in ("sliding_window", "use_sliding_window", "layer_types"):
        del deepspec[name]
    assert drafter_config(deepspec, "dflash").sliding_window == 2048


def test_a_window_that_is_switched_off_is_none(deepspec):
    del deepspec["layer_types"]
    deepspec |= {"sliding_window": 2048, "use_sliding_window": False}
    assert drafter_config(deepspec, "off").sliding_window is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": None}, ["lacks", "mask_token_id"]),
        ({"block_size": "x"}, ["block_size is 'x'; wanted a whole number"]),
        ({"target_layer_ids": [0, "1"]}, ["target_layer_ids is [0, '1']; wanted a list"]),
        ({"mask_token_id": 160}, ["160", "0 to 159"]),
        ({"target_layer_ids": [1, 3]}, ["3", "final layer"]),
        ({"block_size": 0}, ["block_size is 0"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank is 0"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"model_type": "gemma4"}, ["gemma4", "qwen3"]),
        ({"architectures": ["Gemma4DSparkModel"]}, ["Gemma4DSparkModel", "Qwen3DSparkModel"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "all"]),
        ({"dflash_config": {"block_size": 9}}, ["block_size", "7", "9", "dflash_config"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["fp8"]),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(deepspec, changes, words):
    with pytest.raises(ValueError, match="somewhere") as caught:
        drafter_config(deepspec | changes, "somewhere")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_from_anchor": False}, ["sample_from_anchor", "false"]),
        ({"transformer_layer_config": {}}, ["transformer_layer_config"]),
        ({"aux_hidden_state_layer_ids": [4]}, ["contains 3", "final layer"]),
    ],
)
def test_a_speculators_config_that_cannot_be_honoured_is_refused(speculators, changes, words):
    with pytest.raises(ValueError, match="somewhere") as caught:
        drafter_config(speculators | changes, "somewhere", TARGET)
    for word in words:
        assert word in str(caught.value)


def test_causal_blocks_inside_a_window_are_refused(speculators):
    speculators["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 2048,
    }
    with pytest.raises(ValueError, match=r"2048.*sliding_window_non_causal"):
        drafter_config(speculators, "somewhere", TARGET)


def test_a_deepseek_target_with_its_drafter_is_not_the_config_of_a_drafter_alone():
    raw = {"model_type": "deepseek_v4", "dspark_block_size": 5, "dspark_target_layer_ids": [37]}
    assert not is_drafter(raw)
    with pytest.raises(ValueError, match=r"DeepSeek checkpoint.*wanted .* drafter alone"):
        drafter_config(raw, "somewhere")


def test_a_target_is_told_from_a_drafter(deepspec, speculators):
    target = json.loads((GOLDEN / "qwen3_tiny" / "config.json").read_text())
    assert not is_drafter(target)
    assert is_drafter(deepspec)
    assert is_drafter(speculators)
    with pytest.raises(ValueError, match="not the config of a drafter"):
        drafter_config(target, "somewhere")


def test_reserved_ids_are_read_from_either_nesting(deepspec, speculators):
    assert reserved_ids(deepspec) == {}
    assert reserved_ids(deepspec | {"eos_token_id": [3, 4], "pad_token_id": 0}) == {
        "eos": (3, 4),
        "pad": (0,),
    }
    speculators["transformer_layer_config"]["eos_token_id"] = 5
    assert reserved_ids(speculators) == {"eos": (5,)}
