"""Indexer scores: ragged batches against loops over requests, and legality on Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_logits import Batch, indexer_logits, pallas_triton, reference
from pallas_kernels.indexer_logits.pallas_triton import Tuning
from pallas_kernels.indexer_logits.shapes import SHAPES

HEADS, WIDTH, PAGE, COLUMNS, PAGES, TOKENS = 16, 32, 24, 4, 13, 9
ROW = np.asarray([[0, 1, 2], [TOKENS] * 3, [3, TOKENS, TOKENS], [4, 5, TOKENS]], np.int32)
"""Windows of 3, 0, 1 and 2 tokens; packed rows 6..8 belong to nobody."""

TABLE = np.asarray([[5, 0, 7, 2], [-1, -1, -1, -1], [11, 3, -1, -1], [12, 9, 4, 40]], np.int32)
SEEN = np.asarray([70, 71, 72, 30, 90, 91, 0, 1, 0], np.int32)


@pytest.fixture(
    scope="module",
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    if request.param == "triton, interpreted":
        tuning = Tuning(keys=64, warps=4, tokens=2)
        return functools.partial(pallas_triton.indexer_logits, tuning=tuning, interpret=True)
    return jax.jit(functools.partial(indexer_logits, implementation=request.param))


def case(seed=0):
    random = np.random.default_rng(seed)

    def draw(*sizes, dtype=jnp.bfloat16):
        return jnp.asarray(random.standard_normal(sizes, np.float32), dtype)

    batch = Batch(jnp.asarray(ROW), jnp.asarray(TABLE), jnp.asarray(SEEN))
    query, weight = draw(TOKENS, HEADS, WIDTH), draw(TOKENS, HEADS, dtype=jnp.float32)
    return query, weight, draw(PAGES, PAGE, WIDTH), batch


def by_hand(query, weight, keys, batch):
    """Token by token; NaN where scores may be anything."""
    query, weight, keys = (np.asarray(x, np.float64) for x in (query, weight, keys))
    out = np.full((TOKENS, COLUMNS * PAGE), np.nan)
    for table, rows in zip(TABLE, ROW, strict=True):
        blank = np.zeros((PAGE, WIDTH))
        own = np.concatenate([keys[p] if 0 <= p < PAGES else blank for p in table])
        for row in rows[rows < TOKENS]:
            scores = (weight[row, :, None] * np.maximum(query[row] @ own.T, 0)).sum(axis=0)
            out[row, : SEEN[row]] = scores[: SEEN[row]]
    return out


def test_every_token_is_scored_against_the_keys_of_its_own_request(run):
    operands = case()
    got, want = np.asarray(run(*operands)), by_hand(*operands)
    counts = ~np.isnan(want)
    np.testing.assert_allclose(got[counts], want[counts], rtol=1e-5, atol=1e-4)


def test_a_token_is_scored_the_same_alone(run):
    query, weight, keys, batch = case(1)
    together = np.asarray(run(query, weight, keys, batch))
    alone = np.full_like(ROW, TOKENS)
    alone[0, 0] = 1
    got = np.asarray(run(query, weight, keys, batch._replace(row=jnp.asarray(alone))))
    np.testing.assert_array_equal(got[1, : SEEN[1]], together[1, : SEEN[1]])


def test_what_stands_in_pages_of_others_is_inert(run):
    query, weight, keys, batch = case(2)
    foreign = [p for p in range(PAGES) if p not in TABLE]
    broken = keys.at[jnp.asarray(foreign)].set(jnp.nan)
    got, want = (np.asarray(run(query, weight, k, batch)) for k in (broken, keys))
    counts = ~np.isnan(by_hand(query, weight, keys, batch))
    np.testing.assert_array_equal(got[counts], want[counts])


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape, of = SHAPES[name], jax.ShapeDtypeStruct
    tokens, columns = shape.requests * shape.window, shape.entries // shape.page_size
    query = of((tokens, shape.heads, shape.width), jnp.bfloat16)
    keys = of((shape.requests * columns, shape.page_size, shape.width), jnp.bfloat16)
    batch = Batch(
        of((shape.requests, shape.window), jnp.int32),
        of((shape.requests, columns), jnp.int32),
        of((tokens,), jnp.int32),
    )
    assert pallas_triton.unsupported(query, keys, batch) is None
    weight = of(query.shape[:2], jnp.float32)
    text = lowered_for_hopper(pallas_triton.indexer_logits, query, weight, keys, batch)
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("query", "keys", "says"),
    [
        (
            np.zeros((2, 16, 32), np.float32),
            np.zeros((1, 4, 32), jnp.bfloat16),
            "dtype of query is float32",
        ),
        (
            np.zeros((2, 16, 32), jnp.bfloat16),
            np.zeros((1, 4, 32), np.float32),
            "dtype of keys is float32",
        ),
        (
            np.zeros((2, 4, 32), jnp.bfloat16),
            np.zeros((1, 4, 32), jnp.bfloat16),
            "heads J is 4, wanted one of 16, 32, 64, 128",
        ),
        (
            np.zeros((2, 16, 48), jnp.bfloat16),
            np.zeros((1, 4, 48), jnp.bfloat16),
            "key width I is 48",
        ),
    ],
)
def test_the_kernel_says_what_it_does_not_support(query, keys, says):
    assert says in (pallas_triton.unsupported(query, keys, case()[3]) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back():
    operands = case(3)
    with pytest.raises(NotImplementedError, match="indexer_logits cannot run"):
        indexer_logits(*operands, implementation="triton")
    np.testing.assert_array_equal(indexer_logits(*operands), reference.indexer_logits(*operands))


def test_shapes_that_disagree_are_refused():
    query, weight, keys, batch = case()
    with pytest.raises(ValueError, match="weight has shape"):
        indexer_logits(query, weight[1:], keys, batch)
    with pytest.raises(ValueError, match="keys has shape"):
        indexer_logits(query, weight, keys[..., 1:], batch)
    with pytest.raises(ValueError, match="pages has shape"):
        indexer_logits(query, weight, keys, batch._replace(pages=batch.pages[1:]))
    with pytest.raises(ValueError, match="seen has shape"):
        indexer_logits(query, weight, keys, batch._replace(seen=batch.seen[1:]))
