"""No field of a config is read and then forgotten: another value is another model."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import deepseek_v4, deepseek_v32
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.drafter_tensors import drafter_shapes
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.checkpoints.target import dense_shapes
from dspark_jax.models.config import RopeScaling
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.ragged import rectangle

GOLDEN = Path(__file__).parents[1] / "golden"
SLOTS, ROWS, WIDTH = 2, 32, 6
OTHERS = {
    "model_type": "another",
    "markov_head_type": "gated",
    "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16),
    "yarn": Yarn(4.0, 16, 32.0, 1.0),
    "compress_yarn": Yarn(4.0, 16, 32.0, 1.0),
    "sliding_window": 3,
}
"""Another value of what is no number, or None as recorded."""
ELSEWHERE = {
    "model_type": "the reader's choice of a family",
    "max_position_embeddings": "a session's limit of its context",
    "tie_word_embeddings": "the reader: a head of its own, or none",
    "qk_norm": "the weights: whether there are norms",
    "num_nextn_predict_layers": "the reader: tensors to leave alone",
    "num_hidden_layers": "the reader, where the layers' ratios say it as well (V4)",
    "target_layer_ids": "the target's taps",
    "num_target_layers": "the check that drafter and target fit",
}
"""Fields that no program of a step shows, and what looks at them."""


def other(config, field):
    value = getattr(config, field.name)
    if (field.name in OTHERS and value is None) or isinstance(value, str):
        return OTHERS[field.name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    if isinstance(value, float):
        return 1.5 * value
    if dataclasses.is_dataclass(value):
        return None
    return (*value[:-1], 0 if value[-1] else 4)


@functools.cache
def target(name):
    return load_target(GOLDEN / name, jnp.float32)


def target_program(config, weights):
    """Logits of a chunk of two texts, longer than any window or choice of the recorded models."""
    family = config.family

    def run(weights, tokens):
        cache = family.init_cache(config, SLOTS, ROWS, jnp.float32)
        start, count = jnp.full(SLOTS, ROWS - WIDTH), jnp.full(SLOTS, WIDTH)
        rows = rectangle(tokens, start, count)
        hidden, _, cache = family.forward(config, weights, cache, rows, taps=())
        return family.unembed(config, weights, hidden), cache

    return traced(run, weights, jnp.zeros((SLOTS, WIDTH), jnp.int32))


def drafter_program(config, weights):
    """A row of context, a block behind it, and a position of its walk."""
    family = config.family

    def run(weights, taps, anchor):
        context = family.init_context(config, SLOTS, ROWS, jnp.float32)
        slot = jnp.arange(SLOTS)
        context = family.commit_context(config, weights, context, taps, slot, slot)
        hidden = family.block_hidden(config, weights, weights.embed, context, anchor, anchor)
        state = family.start_walk(config, weights, SLOTS)
        logits = family.base_logits(config, weights, weights.lm_head, hidden)
        confidence = family.confidences(config, weights, hidden[:, :1], anchor[:, None])
        return logits, family.walk(config, weights, state, hidden[:, 0], anchor), confidence

    width = len(config.target_layer_ids) * config.target_hidden_size
    return traced(run, weights, jnp.zeros((SLOTS, width)), jnp.ones(SLOTS, jnp.int32))


def traced(run, *operands):
    closed = jax.make_jaxpr(run)(*operands)
    return str(closed.jaxpr), [np.asarray(one).tolist() for one in closed.consts]


def case(name):
    """Config, shapes that a checkpoint of a config must have, and the program of a config."""
    if name == "dspark_vanilla":
        qwen = target("qwen3_tiny")
        drafter = load_drafter(GOLDEN / name, (qwen.config, qwen.weights), jnp.float32)
        return drafter.config, drafter_shapes, drafter_program, drafter.weights
    config, weights = target(name).config, target(name).weights
    if config.model_type == "deepseek_v4":
        # a layer of each kind of attention, with experts by token and by score
        ratios = config.compress_ratios[:3]
        config = dataclasses.replace(config, num_hidden_layers=3, compress_ratios=ratios)
        return (
            config,
            deepseek_v4.target_shapes,
            target_program,
            weights.replace(layers=weights.layers[:3]),
        )
    shapes = deepseek_v32.target_shapes if config.model_type == "deepseek_v32" else dense_shapes
    return config, shapes, target_program, weights


def unnoticed(config, shapes, program, weights):
    """Fields whose other value changes neither the tensors wanted nor the program."""
    before = shapes(config), program(config, weights)
    for field in dataclasses.fields(config):
        changed = dataclasses.replace(config, **{field.name: other(config, field)})
        try:
            same = shapes(changed) == before[0] and program(changed, weights) == before[1]
        except (TypeError, ValueError, IndexError, AssertionError, AttributeError):
            same = False  # a contradiction has been noticed
        if same:
            yield field.name


@pytest.mark.parametrize(
    "name",
    ["llama_tiny", "qwen3_tiny", "deepseek_v32_tiny", "deepseek_v4_tiny", "dspark_vanilla"],
)
def test_another_value_of_any_field_is_another_model(name):
    assert set(unnoticed(*case(name))) <= set(ELSEWHERE)
