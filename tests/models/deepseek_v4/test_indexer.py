"""DeepSeek-V4's indexer takes exactly the entries its equation names, by every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models.deepseek_v4 import model
from dspark_jax.models.deepseek_v4.batch import locate_rows
from dspark_jax.models.deepseek_v4.indexer import choose_entries
from dspark_jax.models.deepseek_v4.plan import make_plan
from dspark_jax.models.ragged import compact
from tests.models.chosen_by_hand import best, scores, ternary, ties

HEADS, WIDTH, COUNT, SLOTS, CAPACITY = 16, 64, 8, 3, 480
START, WINDOW = np.array([390, 4, 205], np.int32), np.array([12, 9, 0], np.int32)
"""Windows, in which entries close and are seen from then on; the second sees 1 to 3."""


def test_entries_chosen_of_ragged_batches_full_of_ties(toy, indexer_as):
    config = dataclasses.replace(
        toy.config, index_n_heads=HEADS, index_head_dim=WIDTH, index_topk=COUNT
    )
    rows, random = 24, np.random.default_rng(12)
    start = jax.jit(model.init_cache, static_argnums=(0, 1, 2, 3))
    cache = start(config, SLOTS, CAPACITY, jnp.bfloat16)
    pages, size, _ = cache.layers[0].index.entries.shape
    columns = cache.table.shape[1]
    table = random.permutation(pages).reshape(SLOTS, columns).astype(np.int32)
    keys = ternary(random, pages, size, WIDTH)
    # a query is the sum of the few rows of the matrix that its token names
    matrix = ternary(random, HEADS * WIDTH, 16)
    low = random.integers(0, 2, (rows, 16)).astype(np.float32)
    weight = random.integers(-2, 4, (rows, HEADS)).astype(np.float32)
    indexer = toy.weights.layers[0].attention.indexer.replace(
        query=matrix.astype(jnp.bfloat16), head_weight=np.eye(HEADS, dtype=jnp.bfloat16)
    )
    packed = jax.jit(compact, static_argnums=3)(
        np.zeros((SLOTS, 12), np.int32), START, WINDOW, rows
    )

    @jax.jit
    def run(keys, weight, low):
        plan = make_plan(
            config, cache.replace(table=jnp.asarray(table)), locate_rows(packed, SLOTS)
        )
        cosine, sine = plan.turn[1]
        plan = plan.replace(turn=(plan.turn[0], (jnp.ones_like(cosine), jnp.zeros_like(sine))))
        return choose_entries(config, indexer, keys, plan, weight, low)

    chosen = np.asarray(run(*(value.astype(jnp.bfloat16) for value in (keys, weight, low))))
    query = (low @ matrix.T).reshape(rows, HEADS, WIDTH)
    row = tied = 0
    for slot, (start, count) in enumerate(zip(START, WINDOW, strict=True)):
        own = keys[table[slot]].reshape(-1, WIDTH)
        for position in range(start, start + count):
            found = scores(query[row], weight[row], own[: (position + 1) // 4])
            assert [at for at in chosen[row] if at >= 0] == best(found, COUNT)
            tied += ties(found, COUNT)
            row += 1
    assert tied > WINDOW[0] / 3
    assert (chosen[row:] == -1).all()
