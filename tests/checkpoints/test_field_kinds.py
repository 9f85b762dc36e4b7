"""Every reader of a config refuses what it cannot use, by file, field, value and what it wants."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_jax.checkpoints.deepseek_v4_config import deepseek_v4_config
from dspark_jax.checkpoints.deepseek_v32_config import deepseek_v32_config
from dspark_jax.checkpoints.drafter_config import drafter_config, reserved_ids
from dspark_jax.checkpoints.drafter_deepseek_v4 import deepseek_v4_drafter_config
from dspark_jax.checkpoints.target import dense_config
from dspark_jax.testing.deepseek_v4 import deepseek_fields, toy_config

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=48, vocab_size=160)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V4 = deepseek_fields(toy_config()) | {
    "dspark_block_size": 3,
    "dspark_noise_token_id": 5,
    "dspark_markov_rank": 4,
    "dspark_target_layer_ids": [0, 1],
}
WRONG = ("x", "", 2.5, float("nan"), 0, -1, 7, True, False, [], [2.5], ["x"], {}, {"x": 1}, None)


def golden(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


def drafter(raw, where):
    return drafter_config(raw, where, TARGET), reserved_ids(raw)


READERS = {
    "llama": (dense_config, golden("llama_tiny", rope_parameters=LLAMA3)),
    "qwen3": (dense_config, golden("qwen3_tiny")),
    "v4": (deepseek_v4_config, V4),
    "v4 transformers": (deepseek_v4_config, golden("deepseek_v4_tiny")),
    "v4 drafter": (deepseek_v4_drafter_config, V4),
    "v32": (
        deepseek_v32_config,
        golden("deepseek_v32_tiny", rope_parameters=None)
        | {"rope_theta": 1e4, "rope_scaling": YARN},
    ),
    "deepspec": (drafter, golden("dspark_vanilla", eos_token_id=[2], rope_parameters=LLAMA3)),
    "speculators": (drafter, golden("speculators_full")),
}


def places(raw):
    """The path of every field, those of nested objects too."""
    for name, value in raw.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inner) for inner in places(value))


def changed(raw, place, *value):
    """A copy with another value at ``place``, or without it."""
    raw = copy.deepcopy(raw)
    inner = raw
    for name in place[:-1]:
        inner = inner[name]
    if value:
        (inner[place[-1]],) = value
    else:
        del inner[place[-1]]
    return raw


def faults(read, raw):
    """What is wrong with how a reader answers every wrong value of every field."""
    read(raw, "config.json")
    for place in places(raw):
        for value in ((), *((one,) for one in WRONG)):
            said = ""
            try:
                read(changed(raw, place, *value), "config.json")
            except ValueError as error:
                said = str(error)
            except Exception as error:
                yield f"{place} = {value}: {error!r}"
            if said and not ("config.json" in said and any(part in said for part in place)):
                yield f"{place} = {value}: {said}"


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_value_ends_in_an_error_that_names_file_and_field_and_in_nothing_else(name):
    assert not list(faults(*READERS[name]))
