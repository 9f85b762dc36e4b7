"""A position of the walk: what is drawn, from which scores, and legality on Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.markov_sample import (
    Confidence,
    Position,
    markov_sample,
    pallas_triton,
    reference,
    threefry,
)
from pallas_kernels.markov_sample.pallas_triton import Tuning
from pallas_kernels.markov_sample.shapes import SHAPES

REQUESTS, WALKED, DEPTH, COLUMNS, RANK, HIDDEN = 19, 2, 3, 200, 16, 40


@pytest.fixture(
    scope="module",
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    if request.param == "triton, interpreted":
        tuning = Tuning(tile=64, rows=16)
        return functools.partial(pallas_triton.markov_sample, tuning=tuning, interpret=True)
    call = functools.partial(markov_sample, implementation=request.param)
    return jax.jit(call, static_argnames=("index", "depth", "last"))


def position(seed=0, *, sampled=True, head="embedding", requests=REQUESTS, columns=COLUMNS):
    random = np.random.default_rng(seed)

    def draw(*sizes, dtype=jnp.bfloat16):
        return jnp.asarray(random.standard_normal(sizes, np.float32), dtype)

    embedding = draw(requests, RANK)
    confidence = {
        "embedding": Confidence(
            draw(requests, HIDDEN), embedding, draw(HIDDEN + RANK), draw(dtype=jnp.float32)
        ),
        "hidden": Confidence(draw(requests, HIDDEN), None, draw(HIDDEN), None),
        "none": None,
    }[head]
    temperature = jnp.where(jnp.arange(requests) % 3 == 0, 0.0, 0.5 + jnp.arange(requests) / 10)
    return Position(
        base=draw(requests, WALKED, columns, dtype=jnp.float32),
        ranked=embedding,
        matrix=draw(columns, RANK),
        temperature=temperature,
        keys=jax.random.split(jax.random.key(seed), requests) if sampled else None,
        confidence=confidence,
    )


def scores_by_hand(operands, index):
    logits = np.asarray(operands.base[:, index], np.float64)
    logits = (
        logits + np.asarray(operands.ranked, np.float64) @ np.asarray(operands.matrix, np.float64).T
    )
    temperature = np.asarray(operands.temperature, np.float64)
    return logits / np.where(temperature == 0, 1, temperature)[:, None]


def log_softmax(scores):
    scores = np.asarray(scores, np.float64)
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_noise_is_that_of_jax_to_the_bit():
    keys = jax.random.split(jax.random.key(5), 3)
    first, second = jax.random.key_data(keys).T[..., None]
    counter = jnp.arange(1000, dtype=jnp.uint32)
    wanted = jax.vmap(lambda key: jax.random.bits(key, (1000,)))(keys)
    np.testing.assert_array_equal(threefry.bits(first, second, counter), wanted)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (1000,)))(keys)
    np.testing.assert_array_equal(threefry.gumbel(first, second, counter), noise)


def test_scores_are_base_plus_bias_over_temperature(run):
    operands = position()
    found = run(operands, None, index=1, depth=DEPTH)
    np.testing.assert_allclose(
        found.scores[:, 1], scores_by_hand(operands, 1), rtol=1e-5, atol=1e-5
    )


def test_a_draw_is_the_best_of_the_returned_scores_and_the_noise(run):
    operands = position(1)
    found = run(operands, None, index=0, depth=DEPTH)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (COLUMNS,)))(operands.keys)
    greedy = operands.temperature[:, None] == 0
    perturbed = jnp.where(greedy, found.scores[:, 0], found.scores[:, 0] + noise)
    np.testing.assert_array_equal(found.column, perturbed.argmax(axis=-1))
    wanted = np.take_along_axis(
        log_softmax(found.scores[:, 0]), np.asarray(found.column)[:, None], axis=-1
    )
    np.testing.assert_allclose(found.logprob, wanted[:, 0], rtol=1e-5, atol=1e-5)


def test_positions_fill_one_array_of_scores(run):
    operands = position(2)
    first = run(operands, None, index=0, depth=DEPTH)
    kept = np.asarray(first.scores[:, 0])
    found = run(operands, first.scores, index=1, depth=DEPTH, last=True)
    np.testing.assert_array_equal(found.scores[:, 0], kept)
    np.testing.assert_allclose(
        found.scores[:, 1], scores_by_hand(operands, 1), rtol=1e-5, atol=1e-5
    )
    assert not found.scores[:, 2:].any()


def test_without_noise_the_best_column_is_all_there_is(run):
    operands = position(3, sampled=False)
    found = run(operands, None, index=1, depth=DEPTH)
    assert found.scores is None
    assert found.logprob is None
    np.testing.assert_array_equal(found.column, scores_by_hand(operands, 1).argmax(axis=-1))


def test_the_lowest_column_wins_among_equals(run):
    operands = position(4, sampled=False)
    operands = operands._replace(
        base=jnp.zeros_like(operands.base).at[:, :, jnp.asarray([70, 150, 199])].set(3.0),
        matrix=jnp.zeros_like(operands.matrix),
    )
    assert (np.asarray(run(operands, None, index=0, depth=DEPTH).column) == 70).all()


@pytest.mark.parametrize("head", ["embedding", "hidden", "none"])
def test_confidence_is_a_linear_head(run, head):
    operands = position(5, head=head)
    found = run(operands, None, index=0, depth=DEPTH).confidence
    if operands.confidence is None:
        assert found is None
        return
    hidden, embedding, weight, bias = (
        None if x is None else np.asarray(x, np.float64) for x in operands.confidence
    )
    seen = hidden if embedding is None else np.concatenate([hidden, embedding], axis=1)
    wanted = seen @ weight + (0 if bias is None else bias)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_lower_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    of = jax.ShapeDtypeStruct
    operands = Position(
        base=of((shape.requests, shape.depth, shape.vocabulary), jnp.float32),
        ranked=of((shape.requests, shape.rank), jnp.bfloat16),
        matrix=of((shape.vocabulary, shape.rank), jnp.bfloat16),
        temperature=of((shape.requests,), jnp.float32),
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape.requests))
        if shape.sampled
        else None,
        confidence=Confidence(
            of((shape.requests, shape.hidden), jnp.bfloat16),
            of((shape.requests, shape.rank), jnp.bfloat16),
            of((shape.hidden + shape.rank,), jnp.bfloat16),
            of((), jnp.float32),
        ),
    )
    scores = None
    if shape.sampled:
        assert operands.keys is not None
        scores = of((shape.requests, shape.depth, shape.vocabulary), jnp.float32)
    assert pallas_triton.unsupported(operands) is None

    def walk(operands, scores):
        return pallas_triton.markov_sample(operands, scores, 1, shape.depth)

    assert lowered_for_hopper(walk, operands, scores).count("xla.gpu.triton") == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": jnp.zeros((2, 1, 8), jnp.bfloat16)}, "dtype of base is bfloat16"),
        ({"ranked": jnp.zeros((2, 16))}, "dtype of ranked is float32"),
        ({"matrix": jnp.zeros((8, 48), jnp.bfloat16)}, "the rank is 48"),
        ({"keys": jax.random.split(jax.random.key(0, impl="rbg"), 2)}, "dtype of keys is key<rbg>"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(change, says):
    operands = position(requests=2)._replace(**change)
    assert says in (pallas_triton.unsupported(operands) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back(monkeypatch):
    operands = position(6)
    with pytest.raises(NotImplementedError, match="markov_sample cannot run"):
        markov_sample(operands, None, 0, DEPTH, implementation="triton")
    monkeypatch.setattr("pallas_kernels.markov_sample.api.AUTOMATIC", "triton")
    got = markov_sample(operands, None, 0, DEPTH)
    wanted = reference.markov_sample(operands, None, 0, DEPTH)
    np.testing.assert_array_equal(got.column, wanted.column)


def test_shapes_that_disagree_are_refused():
    operands = position()
    with pytest.raises(ValueError, match=r"index is 2, wanted 0\.\.1"):
        markov_sample(operands, None, 2, DEPTH)
    with pytest.raises(ValueError, match="matrix has shape"):
        markov_sample(operands._replace(matrix=operands.matrix[1:]), None, 0, DEPTH)
    with pytest.raises(ValueError, match="scores has shape"):
        markov_sample(operands, operands.base, 0, DEPTH)
