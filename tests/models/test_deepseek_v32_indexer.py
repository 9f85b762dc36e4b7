"""DeepSeek-V3.2's indexer takes exactly the rows its equation names, by every implementation."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.models.deepseek_v32.cache import DeepseekV32Cache, LayerCache
from dspark_jax.models.deepseek_v32.indexer import choose_rows
from dspark_jax.models.deepseek_v32.places import find_places
from dspark_jax.models.ragged import Mixed, compact, rectangle
from tests.models.chosen_by_hand import best, scores, ternary, ties

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v32_tiny"
HEADS, WIDTH, COUNT, PAGE, COLUMNS, SLOTS = 16, 64, 8, 12, 10, 3
TABLE = np.random.default_rng(0).permutation(SLOTS * COLUMNS + 2)[: SLOTS * COLUMNS]
TABLE = TABLE.reshape(SLOTS, COLUMNS).astype(np.int32)
TABLE[0, 4:] = -1
PROMPT, START, WINDOW = 20, np.array([40, 99, 7], np.int32), np.array([3, 4, 1], np.int32)
SLOT = np.concatenate([np.full(PROMPT, 2), np.repeat(np.arange(SLOTS), WINDOW)])
POSITION = np.concatenate(
    [
        60 + np.arange(PROMPT),
        *(first + np.arange(count) for first, count in zip(START, WINDOW, strict=True)),
    ]
)
"""Of a piece of slot 2's prompt, then of windows of 3, 4 and 1 tokens in 12 rows."""


def batch():
    tokens = np.zeros((1, PROMPT), np.int32)
    prompt = rectangle(tokens, *np.array([[60], [PROMPT], [2]], np.int32))
    pack = jax.jit(compact, static_argnums=3)
    windows = pack(np.zeros((SLOTS, 4), np.int32), START, WINDOW, 12)
    return Mixed((prompt, windows))


def test_rows_chosen_of_ragged_batches_full_of_ties(indexer_as):
    target = load_target(GOLDEN, "float32")
    config = dataclasses.replace(
        target.config, index_n_heads=HEADS, index_head_dim=WIDTH, index_topk=COUNT
    )
    indexer = target.weights.layers[0].attention.indexer.replace(
        head_weight=np.eye(HEADS, dtype=np.float32)
    )
    random = np.random.default_rng(11)
    packed = batch()
    rows = packed.tokens.shape[0]
    keys = ternary(random, SLOTS * COLUMNS + 2, PAGE, WIDTH)
    query = ternary(random, rows, HEADS, WIDTH)
    weight = random.integers(-2, 4, (rows, HEADS)).astype(np.float32)

    @jax.jit
    def run(keys, query, weight):
        layer = LayerCache(latent=keys[..., :1], index=keys)
        cache = DeepseekV32Cache((layer,), jnp.zeros(SLOTS, jnp.int32), jnp.asarray(TABLE))
        places = find_places(cache, packed)
        unturned = (jnp.ones((rows, 4)), jnp.zeros((rows, 4)))
        return choose_rows(config, indexer, keys, places, weight, query, unturned)

    half = jnp.bfloat16
    chosen, margin = map(np.asarray, run(keys.astype(half), query.astype(half), weight))
    tied = 0
    for row, (slot, position) in enumerate(zip(SLOT, POSITION, strict=True)):
        own = np.where(TABLE[slot, :, None, None] >= 0, keys[TABLE[slot]], 0).reshape(-1, WIDTH)
        found = scores(query[row], weight[row], own[: position + 1])
        wanted = best(found, COUNT)
        assert [at for at in chosen[row] if at >= 0] == wanted
        left = np.delete(found, wanted).max(initial=-np.inf)
        assert margin[row] == (found[wanted].min() - left) / 32
        tied += ties(found, COUNT)
    assert tied > len(SLOT) / 3
    assert (chosen[len(SLOT) :] == -1).all()
