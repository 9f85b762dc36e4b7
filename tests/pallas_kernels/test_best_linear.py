"""The best token of a head: one suite over every implementation, and legality on Hopper."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.best_linear import avoids_logits, best_linear, mosaic_gpu, reference
from pallas_kernels.best_linear.api import MANY_ROWS
from pallas_kernels.best_linear.mosaic_gpu import Tuning, tuning_of
from pallas_kernels.best_linear.shapes import SHAPES, Shape
from pallas_kernels.choice import preferring


def interpreted(x, weight, low_rank=None):
    """The Mosaic kernel on the CPU, checked for races; few blocks and buffers, so that all wrap."""
    rows = 64 if len(x) <= 64 else 128
    result = mosaic_gpu.best_linear(
        x,
        weight,
        low_rank,
        tuning=Tuning(rows, 128, stages=2, blocks=2),
        interpret=InterpretGPUParams(detect_races=True),
    )
    jax.block_until_ready(result)
    assert not interpret_pallas_call.get_races().races_found
    return result


@pytest.fixture(
    params=["xla", "mosaic, interpreted", pytest.param("mosaic", marks=pytest.mark.gpu)]
)
def best(request: pytest.FixtureRequest) -> Iterator[Callable]:
    if request.param == "mosaic, interpreted":
        yield interpreted
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        return
    yield jax.jit(functools.partial(best_linear, implementation=request.param))


def draw(*sizes, seed=0):
    """Small whole numbers: their sums are exact, and equal ones are frequent."""
    random = np.random.default_rng([seed, *sizes])
    return jax.device_put(random.integers(-2, 3, sizes).astype(jnp.bfloat16))


def head(rows, outputs, rank=0, width=128):
    low_rank = (draw(rows, rank, seed=2), draw(outputs, rank, seed=3)) if rank else None
    return draw(rows, width), draw(outputs, width, seed=1), low_rank


def by_hand(x, weight, low_rank):
    x, weight = np.asarray(x, np.int64), np.asarray(weight, np.int64)
    logits = x @ weight.T
    if low_rank is not None:
        y, weight2 = (np.asarray(operand, np.int64) for operand in low_rank)
        logits += y @ weight2.T
    return logits.argmax(axis=1), logits.max(axis=1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("rows", "outputs", "rank"), [(1, 256, 0), (3, 304, 64), (64, 712, 0), (130, 304, 64)]
)
def test_every_row_gets_its_best_output_and_its_logit(best, rows, outputs, rank):
    case = head(rows, outputs, rank)
    token, logit = best(*case)
    assert (token.dtype, logit.dtype) == (jnp.int32, jnp.float32)
    want_token, want_logit = by_hand(*case)
    np.testing.assert_array_equal(token, want_token)
    np.testing.assert_array_equal(logit, want_logit)


@pytest.mark.timeout(60)
def test_the_lowest_among_equals_wins_wherever_they_are(best):
    # the same output twice: in one chunk, in two warpgroups' parts, in two tiles, in three
    x, weight = np.eye(4, 128), np.zeros((600, 128))
    for row, places in enumerate([(3, 5), (40, 100), (130, 599), (7, 300, 599)]):
        weight[list(places), row] = 2
    token, logit = best(*jax.device_put((x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))))
    np.testing.assert_array_equal(token, [3, 40, 130, 7])
    np.testing.assert_array_equal(logit, 2)


@pytest.mark.timeout(60)
def test_logits_below_zero_beat_padding(best):
    # both the rows that fill a tile of inputs and columns past the last output would give zeros
    token, logit = best(jnp.full((3, 64), -1, jnp.bfloat16), jnp.ones((304, 64), jnp.bfloat16))
    np.testing.assert_array_equal(token, 0)
    np.testing.assert_array_equal(logit, -64)


@pytest.mark.timeout(60)
def test_a_row_of_nan_names_an_output_and_leaves_the_others_alone(best):
    x, weight, _ = head(3, 304)
    token, _ = best(x.at[1].set(jnp.nan), weight)
    want, _ = by_hand(x, weight, None)
    assert 0 <= token[1] < 304
    np.testing.assert_array_equal(token[::2], want[::2])


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    case = specs(SHAPES[name])
    assert mosaic_gpu.unsupported(*case) is None
    assert "mosaic_gpu" in lowered_for_hopper(mosaic_gpu.best_linear, *case)


@pytest.mark.parametrize("rows", [64, 512])
def test_a_vocabulary_that_fills_no_tile_lowers_for_hopper(lowered_for_hopper, rows):
    case = specs(Shape(rows, 64, 264, 64))
    assert mosaic_gpu.unsupported(*case) is None
    assert "mosaic_gpu" in lowered_for_hopper(mosaic_gpu.best_linear, *case)


def specs(shape):
    def spec(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    rank = shape.rank
    low_rank = (spec(shape.rows, rank), spec(shape.outputs, rank)) if rank else None
    return spec(shape.rows, shape.width), spec(shape.outputs, shape.width), low_rank


def test_no_logits_are_written(lowered_for_hopper):
    case = specs(SHAPES["smollm2-135m draft 128"])
    assert "49152xf32" not in lowered_for_hopper(mosaic_gpu.best_linear, *case)
    assert "49152xf32" in lowered_for_hopper(reference.best_linear, *case)


@pytest.mark.parametrize(("rows", "columns"), [(1, 192), (64, 192), (128, 192), (8192, 256)])
def test_tiles_are_cut_so_that_no_block_waits_long_for_the_last(rows, columns):
    assert tuning_of(rows, 49152).columns == columns


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "the dtype of x is float32"),
        ({"width": 96}, "x has 96 columns, wanted a multiple of 64"),
        ({"rank": 32}, "y has 32 columns, wanted a multiple of 64"),
        ({"rows": 0}, "x has 0 rows"),
        ({"outputs": 128}, "weight has 128 rows, wanted a multiple of 8, at least 256"),
        ({"outputs": 300}, "weight has 300 rows, wanted a multiple of 8"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(change, says):
    sizes = {"dtype": jnp.bfloat16, "rows": 2, "width": 64, "outputs": 256, "rank": 0} | change
    x, weight, low_rank = head(sizes["rows"], sizes["outputs"], sizes["rank"], sizes["width"])
    assert says in (mosaic_gpu.unsupported(x.astype(sizes["dtype"]), weight, low_rank) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
@pytest.mark.parametrize("rows", [2, MANY_ROWS])
def test_mosaic_without_a_gpu_raises_and_the_default_falls_back(rows):
    case = head(rows, 256, 64)
    with pytest.raises(NotImplementedError, match="best_linear cannot run"):
        best_linear(*case, implementation="mosaic")
    assert not avoids_logits(*case)
    np.testing.assert_array_equal(best_linear(*case)[0], by_hand(*case)[0])


def test_on_hopper_many_rows_avoid_logits_unless_xla_is_preferred(monkeypatch):
    monkeypatch.setattr("pallas_kernels.best_linear.api.missing_hopper", lambda: None)
    assert avoids_logits(*head(MANY_ROWS, 256, 64))
    assert not avoids_logits(*head(MANY_ROWS - 1, 256, 64))
    assert not avoids_logits(*head(MANY_ROWS, 256, 64, width=96))
    with preferring(best_linear="xla"):
        assert not avoids_logits(*head(MANY_ROWS, 256, 64))


def test_shapes_that_disagree_are_refused():
    x, weight, low_rank = head(2, 256, 64)
    assert low_rank is not None
    with pytest.raises(ValueError, match=r"x has shape .*, wanted two axes"):
        best_linear(x[0], weight)
    with pytest.raises(ValueError, match=r"weight has shape .*, wanted two axes and 128 columns"):
        best_linear(x, weight[:, :64])
    with pytest.raises(ValueError, match=r"weight2 has shape .*, wanted two axes and 64 columns"):
        best_linear(x, weight, (low_rank[0], low_rank[1][:, :32]))
    with pytest.raises(ValueError, match=r"y and weight2 have \(1, 256\) rows, wanted \(2, 256\)"):
        best_linear(x, weight, (low_rank[0][:1], low_rank[1]))
    with pytest.raises(ValueError, match="implementation is 'triton'"):
        best_linear(x, weight, implementation="triton")  # type: ignore
