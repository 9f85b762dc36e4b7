"""Blocks attended to in groups see what each would see alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter.backbone import _attend
from train import block_attention
from train.block_attention import attend_in_groups

BATCH, ANCHORS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 4, 2, 8


def operands(width: int, rows: int, starts: list[int], window: int | None = None):
    random = np.random.default_rng(0)
    blocks = (BATCH, ANCHORS, width)
    context = (BATCH, KV_HEADS, rows, HEAD_DIM)
    start = jnp.broadcast_to(jnp.asarray(starts)[None, :, None], (BATCH, ANCHORS, 1))
    row = jnp.arange(rows)
    visible = row < start
    if window is not None:
        visible &= row >= start - window
    own = (*blocks, KV_HEADS, HEAD_DIM)
    shapes = ((*blocks, HEADS, HEAD_DIM), context, context, own, own)
    return *(jax.device_put(np.float32(random.normal(size=shape))) for shape in shapes), visible


# Odd rows and odd keys are padded; the first anchors see no context at all, as dummies do.
@pytest.mark.parametrize(("width", "rows", "group"), [(4, 12, 2), (3, 12, 3), (3, 11, 1)])
def test_grouped_attention_equals_attention_block_by_block(monkeypatch, width, rows, group):
    monkeypatch.setattr(block_attention, "GROUP", group)
    *arrays, visible = operands(width, rows, [0, 0, 1, 4, 9, rows])

    def total(attend, *arrays):
        mixed = attend(*arrays, visible)
        return jnp.sum(jnp.sin(mixed)), mixed

    def run(attend):
        gradient = jax.grad(lambda *a: total(attend, *a), argnums=range(5), has_aux=True)
        return jax.jit(gradient)(*arrays)

    (found, mixed), (wanted, alone) = run(attend_in_groups), run(_attend)
    np.testing.assert_allclose(mixed, alone, atol=2e-6)
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, atol=5e-6)


def test_a_window_hides_the_rows_behind_it_in_a_group_too():
    *arrays, visible = operands(2, 10, [1, 3, 5, 6, 8, 10], window=3)
    found, alone = (jax.jit(attend)(*arrays, visible) for attend in (attend_in_groups, _attend))
    np.testing.assert_allclose(found, alone, atol=2e-6)


def test_rows_that_no_anchor_of_a_group_sees_are_cut_off(monkeypatch):
    asked = {}

    def spy(query, key, value, **masking):
        asked.update(masking, keys=key.shape[1])
        return jnp.zeros_like(query)

    monkeypatch.setattr(block_attention, "attention", spy)
    monkeypatch.setattr(block_attention, "GROUP", 3)
    attend_in_groups(*operands(2, 12, [0, 1, 4, 5, 6, 12]))
    own = 3 * 2
    np.testing.assert_array_equal(asked["key_value_seq_lengths"], [own + 4, own + 12] * BATCH)
    assert asked["keys"] == own + 12
