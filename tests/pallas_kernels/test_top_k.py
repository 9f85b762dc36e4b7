"""Top-k: which positions come out, whatever the scores are, and legality on Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_k import pallas_triton, reference, top_k
from pallas_kernels.top_k.pallas_triton import Tuning
from pallas_kernels.top_k.shapes import SHAPES

ROWS, ENTRIES, COUNT = 7, 300, 16
SMALL = Tuning(tile=64, sample=32, least_kept=64, warps=4)


@pytest.fixture(
    scope="module",
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    calls = {
        "xla": functools.partial(top_k, implementation="xla"),
        "triton, interpreted": functools.partial(pallas_triton.top_k, tuning=SMALL, interpret=True),
        # small cuts, so that rows are split and the list overflows on the GPU as well
        "triton": functools.partial(pallas_triton.top_k, tuning=SMALL),
    }
    return jax.jit(calls[request.param], static_argnames="count")


def by_hand(scores, seen, count):
    """Position by position: NaN above all, later before earlier, then ascending."""
    out = np.full((len(scores), min(count, scores.shape[1])), -1)
    for row, limit in enumerate(np.clip(seen, 0, scores.shape[1])):
        shown = np.where(np.isnan(scores[row, :limit]), np.inf, scores[row, :limit])
        shown = np.maximum(shown, np.finfo(np.float32).min)
        order = sorted(range(limit), key=lambda at, shown=shown: (-shown[at], -at))
        chosen = sorted(order[: out.shape[1]])
        out[row, : len(chosen)] = chosen
    return out


def draw(kind):
    random = np.random.default_rng(len(kind))
    scores = random.standard_normal((ROWS, ENTRIES)).astype(np.float32)
    return {
        "normal": lambda: scores,
        "mostly zero": lambda: np.where(scores > 1.9, scores, 0).astype(np.float32),
        "zeros of both signs": lambda: np.where(scores > 0, 0.0, -0.0).astype(np.float32),
        "few values": lambda: np.round(scores).astype(np.float32),
        "all equal": lambda: np.full_like(scores, -3.5),
        "rising": lambda: np.sort(scores, axis=1),
        "falling": lambda: np.sort(scores, axis=1)[:, ::-1].copy(),
        "periodic": lambda: np.tile(scores[:, :10], (1, 30)),
        "negative": lambda: -np.abs(scores) - 1e30,
    }[kind]()


SEEN = np.asarray([ENTRIES, 0, 5, COUNT, COUNT + 1, 150, ENTRIES], np.int32)


@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "mostly zero",
        "zeros of both signs",
        "few values",
        "all equal",
        "rising",
        "falling",
        "periodic",
        "negative",
    ],
)
def test_the_highest_seen_scores_are_chosen_in_order(run, kind):
    scores = draw(kind)
    got = run(jnp.asarray(scores), jnp.asarray(SEEN), count=COUNT)
    np.testing.assert_array_equal(got, by_hand(scores, SEEN, COUNT))


def test_scores_that_are_no_numbers_still_give_distinct_positions(run):
    scores = draw("normal")
    scores[0] = np.nan
    scores[2:5, ::3] = -np.nan
    scores[5, :140] = -np.inf
    scores[6, 1::2] = np.inf
    got = run(jnp.asarray(scores), jnp.asarray(SEEN), count=COUNT)
    np.testing.assert_array_equal(got, by_hand(scores, SEEN, COUNT))


def test_what_is_not_seen_is_inert(run):
    scores = draw("normal")
    junk = np.where(np.arange(ENTRIES) < SEEN[:, None], scores, np.inf)
    junk[3:, -1] = np.nan
    junk[0] = scores[0]
    seen = np.minimum(SEEN, ENTRIES - 1)
    want = run(jnp.asarray(scores), jnp.asarray(seen), count=COUNT)
    np.testing.assert_array_equal(
        run(jnp.asarray(junk), jnp.asarray(seen), count=COUNT), np.asarray(want)
    )


def test_lengths_out_of_range_are_clamped(run):
    scores, seen = draw("normal"), np.asarray([-4, ENTRIES + 9, -1, 1, 2, 3, 2**30], np.int32)
    got = run(jnp.asarray(scores), jnp.asarray(seen), count=COUNT)
    np.testing.assert_array_equal(got, by_hand(scores, seen, COUNT))


def test_more_than_there_are_gives_all(run):
    scores = draw("normal")[:, :20]
    got = run(jnp.asarray(scores), jnp.asarray(SEEN), count=33)
    assert got.shape == (ROWS, 20)
    np.testing.assert_array_equal(got, by_hand(scores, SEEN, 33))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_real_rows_agree_with_the_sort(name):
    from pallas_kernels.top_k.bench import operands

    shape = SHAPES[name]
    scores, seen = operands(shape, 0)
    run = functools.partial(top_k, count=shape.count)
    got = jax.jit(functools.partial(run, implementation="triton"))(scores, seen)
    wanted = jax.jit(functools.partial(run, implementation="xla"))(scores, seen)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_lower_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    scores = jax.ShapeDtypeStruct((shape.rows, shape.entries), jnp.float32)
    seen = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    assert pallas_triton.unsupported(scores, shape.count) is None
    run = functools.partial(pallas_triton.top_k, count=shape.count)
    assert lowered_for_hopper(run, scores, seen).count("xla.gpu.triton") == 3


def test_a_loss_over_chosen_scores_lowers_where_the_choice_is_no_part_of_the_gradient(
    lowered_for_hopper,
):
    """As in training a target: the kernels know no gradient, and a layer is computed again."""

    @jax.checkpoint
    def loss(scores, seen):
        chosen = pallas_triton.top_k(jax.lax.stop_gradient(scores), seen, COUNT)
        return jnp.take_along_axis(scores, chosen, axis=1).sum()

    scores = jax.ShapeDtypeStruct((ROWS, ENTRIES), jnp.float32)
    seen = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    assert "xla.gpu.triton" in lowered_for_hopper(jax.grad(loss), scores, seen)


@pytest.mark.parametrize(
    ("scores", "count", "says"),
    [
        (np.zeros((2, 8), jnp.bfloat16), 4, "dtype of scores is bfloat16"),
        (np.zeros((2, 8), np.float32), 4097, "count is 4097"),
        (np.zeros((0, 8), np.float32), 4, "wanted no empty axis"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(scores, count, says):
    assert says in (pallas_triton.unsupported(scores, count) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back():
    scores, seen = jnp.asarray(draw("normal")), jnp.asarray(SEEN)
    with pytest.raises(NotImplementedError, match="top_k cannot run"):
        top_k(scores, seen, COUNT, implementation="triton")
    np.testing.assert_array_equal(top_k(scores, seen, COUNT), reference.top_k(scores, seen, COUNT))


def test_operands_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"wanted \[T, K\] and \[T\]"):
        top_k(jnp.zeros((2, 8)), jnp.zeros(3, jnp.int32), 4)
    with pytest.raises(ValueError, match="count is 0"):
        top_k(jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32), 0)
