"""Sparse MLA: one suite over every implementation, and legality of the kernel on Hopper."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels import kv_quant
from pallas_kernels.kv_quant import V3_2, V4, empty_pages
from pallas_kernels.sparse_mla import Selection, mosaic_gpu, sparse_mla
from pallas_kernels.sparse_mla.shapes import SHAPES, Shape

Attend = Callable[..., tuple[jax.Array, jax.Array]]
ROUNDING = 5e-3
WIDTH, VALUE_WIDTH = 512, 512
HEADS = 64 if jax.default_backend() == "gpu" else 4  # the kernel needs 64
SM_SCALE = WIDTH**-0.5
write = jax.jit(kv_quant.write, static_argnums=(3, 4))
read = jax.jit(kv_quant.read, static_argnums=(2, 3))
JUNK = (2**31 - 1, -(2**31), 10**6)


@pytest.fixture(params=["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest) -> Attend:
    return jax.jit(
        functools.partial(sparse_mla, sm_scale=SM_SCALE, implementation=request.param),
    )


@pytest.fixture
def interpreted() -> Iterator[Attend]:
    """The Mosaic kernel on the CPU, checked for races, with other tiles than on a GPU."""

    def attend(query, *selections, sinks, **options):
        result = mosaic_gpu.sparse_mla(
            query,
            selections,
            sinks,
            SM_SCALE,
            **options,
            interpret=InterpretGPUParams(detect_races=True),
        )
        jax.block_until_ready(result)
        assert not interpret_pallas_call.get_races().races_found
        return result

    yield attend
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def queries(tokens: int, width: int = WIDTH, heads: int = HEADS) -> jax.Array:
    rng = np.random.default_rng(tokens)
    # Scores of variance 4: some keys matter more than others.
    values = rng.standard_normal((tokens, heads, width), np.float32) * 2
    # rounded on the host, where no shape is a program to compile
    return jax.device_put(values.astype(jnp.bfloat16))


def selection(lists, lengths=None, *, pages=12, page=24, width=WIDTH, seed=1) -> Selection:
    """Random pages, with NaN in every row that no entry within its length names."""
    lists = np.asarray(lists, np.int64)
    pool = np.random.default_rng(seed).standard_normal((pages * page, width), np.float32)
    counted = np.full(len(lists), lists.shape[1]) if lengths is None else np.asarray(lengths)
    named = np.concatenate([ids[: max(n, 0)] for ids, n in zip(lists, counted, strict=True)])
    named = named[(named >= 0) & (named < len(pool))]
    pool[np.setdiff1d(np.arange(len(pool)), named)] = np.nan
    chosen = Selection(
        pool.reshape(pages, page, width).astype(jnp.bfloat16),
        lists.astype(np.int32),
        None if lengths is None else np.asarray(lengths, np.int32),
    )
    return jax.device_put(chosen)


def lists(tokens: int, keys: int, seed: int = 2, rows: int = 288) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, rows, (tokens, keys))


def by_hand(query, *selections, sinks=None, sm_scale=SM_SCALE, value_width=VALUE_WIDTH):
    """Each token by itself, in NumPy at double precision."""
    query = np.asarray(query, np.float64)
    sinks = np.full(query.shape[1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    out = np.zeros((*query.shape[:2], value_width))
    lse = np.full(query.shape[:2], np.inf)
    for t in range(len(query)):
        keys = []
        for chosen in selections:
            pool = np.asarray(chosen.pool, np.float64)
            size = chosen.page_size or pool.shape[1]
            count = len(chosen.indices[t]) if chosen.lengths is None else int(chosen.lengths[t])
            for row in np.asarray(chosen.indices[t])[: max(count, 0)]:
                if 0 <= row < pool.shape[0] * size:
                    keys.append(pool[row // size, row % size])
        if not keys:
            continue
        keys = np.stack(keys)
        scores = query[t] @ keys.T * sm_scale
        top = scores.max(axis=1)
        weights = np.exp(scores - top[:, None])
        lse[t] = top + np.log(weights.sum(axis=1))
        with np.errstate(over="ignore"):
            total = weights.sum(axis=1) + np.exp(sinks - top)
        out[t] = weights @ keys[:, :value_width] / total[:, None]
    return out, lse


def assert_close(got, want) -> None:
    """Output and lse agree to bf16 rounding of weights; infinities are where they should be."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    for t in range(len(out)):  # a token at a time: a small one must not hide behind a large one
        size = np.linalg.norm(want_out[t])
        assert np.linalg.norm(out[t] - want_out[t]) <= ROUNDING * size, f"token {t}"
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


def test_the_reference_is_softmax_attention_at_any_size():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((70, 3, 24)).astype(np.float32)  # more tokens than go at once
    pool = rng.standard_normal((5, 4, 24)).astype(np.float32)
    chosen = Selection(jnp.asarray(pool), jnp.asarray(rng.integers(-1, 20, (70, 7)), jnp.int32))
    sinks = rng.standard_normal(3).astype(np.float32)
    got = jax.jit(functools.partial(sparse_mla, sm_scale=0.3, value_width=16))(
        query, chosen, sinks=sinks
    )
    want = by_hand(query, chosen, sinks=sinks, sm_scale=0.3, value_width=16)
    assert got[0].shape == (70, 3, 16)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("keys", "width"), [(1, 512), (64, 576), (130, 512), (129, 576)])
def test_tokens_attend_to_the_rows_they_list(attend, keys, width):
    case = queries(2, width), selection(lists(2, keys), width=width)
    assert_close(attend(*case), by_hand(*case))


def test_entries_below_zero_name_no_row_wherever_they_stand(attend):
    ids = lists(3, 200)
    ids[0, :130] = -1  # nothing in the first tiles
    ids[1, 70:] = -1
    ids[2, ::2] = -1
    case = queries(3), selection(ids)
    assert_close(attend(*case), by_hand(*case))


def test_a_token_without_rows_gets_zeros_and_an_infinite_lse(attend):
    ids = lists(4, 140)
    ids[1] = -1
    case = queries(4), selection(ids, [140, 140, 0, 3])
    sinks = jnp.zeros(HEADS).at[0].set(jnp.inf).at[1].set(-jnp.inf)
    for given in ({}, {"sinks": sinks}):
        out, lse = attend(*case, **given)
        assert not np.asarray(out[1:3], np.float32).any()
        assert np.isposinf(lse[1:3]).all()
        assert_close((out, lse), by_hand(*case, **given))


def test_entries_past_the_length_are_ignored(attend):
    ids = lists(5, 200)
    lengths = [0, 1, 64, 129, 200]
    for t, length in enumerate(lengths):
        ids[t, length:] = np.resize((*JUNK, 7), 200 - length)
    case = queries(5), selection(ids, lengths)
    assert_close(attend(*case), by_hand(*case))


def test_lengths_out_of_range_are_taken_as_the_nearest_one(attend):
    query, chosen = queries(2), selection(lists(2, 70), [-5, 90])
    want = by_hand(query, dataclasses.replace(chosen, lengths=jnp.asarray([0, 70])))
    assert_close(attend(query, chosen), want)


def test_ids_past_the_pool_name_no_row(attend):
    ids = lists(2, 70)
    ids[0, 3], ids[1, :2] = 288, JUNK[:2]
    case = queries(2), selection(ids)
    assert_close(attend(*case), by_hand(*case))


def test_a_row_listed_twice_counts_twice(attend):
    case = queries(1), selection(np.tile(lists(1, 3), 30))
    assert_close(attend(*case), by_hand(*case))


def test_sinks_take_weight_and_leave_the_lse_alone(attend):
    case = queries(2), selection(lists(2, 70))
    sinks = np.random.default_rng(3).standard_normal(HEADS).astype(np.float32) * 3
    sinks[0], sinks[1], sinks[2], sinks[3] = np.inf, -np.inf, 200, -200
    out, lse = attend(*case, sinks=jnp.asarray(sinks))
    assert_close((out, lse), by_hand(*case, sinks=sinks))
    plain, plain_lse = attend(*case)
    assert not np.asarray(out[:, 0], np.float32).any()
    np.testing.assert_array_equal(out[:, 1], plain[:, 1])
    np.testing.assert_array_equal(lse, plain_lse)


def test_two_selections_share_one_softmax(attend):
    ids = lists(4, 100)
    window = selection(ids, [100, 0, 65, 30], pages=12, seed=4)
    compressed = selection(lists(4, 140, 5, 60), [140, 70, 0, 129], pages=20, page=3, seed=6)
    query = queries(4)
    sinks = jnp.linspace(-2, 2, HEADS)
    got = attend(query, window, compressed, sinks=sinks)
    assert_close(got, by_hand(query, window, compressed, sinks=sinks))


def test_a_ragged_batch_equals_its_requests_run_alone(attend):
    # Two requests with verify windows of 5 and 3 tokens, and padding before and between them.
    ids = lists(11, 150)
    lengths = np.array([0, 0, 140, 141, 142, 143, 144, 0, 1, 2, 150])
    chosen, query = selection(ids, lengths), queries(11)
    out, lse = attend(query, chosen)
    for tokens in (slice(2, 7), slice(8, 11)):
        alone = dataclasses.replace(
            chosen, indices=chosen.indices[tokens], lengths=jnp.asarray(lengths[tokens])
        )
        assert_close((out[tokens], lse[tokens]), attend(query[tokens], alone))


def test_results_do_not_depend_on_the_place_in_the_batch_and_repeat_bitwise(attend):
    query, chosen = queries(6), selection(lists(6, 150), [150, 0, 3, 140, 64, 65])
    order = np.array([4, 2, 0, 5, 1, 3])
    moved = dataclasses.replace(
        chosen, indices=chosen.indices[order], lengths=jnp.asarray(chosen.lengths)[order]
    )
    first = attend(query, chosen)
    for mine, again, shuffled in zip(
        first, attend(query, chosen), attend(query[order], moved), strict=True
    ):
        np.testing.assert_array_equal(mine, again)
        np.testing.assert_array_equal(np.asarray(mine)[order], shuffled)


def test_entries_of_a_mapped_batch_are_what_they_are_alone(attend):
    query, pool = queries(4), selection(lists(4, 70)).pool
    query, chosen = (
        query.reshape(2, 2, *query.shape[1:]),
        jnp.asarray(lists(4, 70)).reshape(2, 2, 70),
    )
    mapped = jax.vmap(lambda q, ids: attend(q, Selection(pool, ids)))(query, chosen)
    for entry in range(2):
        alone = attend(query[entry], Selection(pool, chosen[entry]))
        for batch, one in zip(mapped, alone, strict=True):
            np.testing.assert_array_equal(batch[entry], one)


def test_padded_pages_are_stepped_over(attend):
    ids = lists(2, 70, rows=12 * 20)
    dense = selection(ids, page=20)
    padding = ((0, 0), (0, 4), (0, 0))
    padded = Selection(
        jnp.pad(dense.pool, padding, constant_values=jnp.nan), dense.indices, page_size=20
    )
    query = queries(2)
    for mine, theirs in zip(attend(query, padded), attend(query, dense), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("layout", [V3_2, V4], ids=["v3.2", "v4"])
def test_pools_of_bytes_are_dequantised(attend, layout):
    ids = lists(4, 150, rows=60)
    ids[0, :70], ids[2, 5:] = -1, JUNK[0]
    chosen, dense = bytes_and_numbers(layout, ids, [150, 150, 6, 0])
    other, other_dense = bytes_and_numbers(layout, lists(4, 70, rows=60), [0, 70, 1, 0])
    query, sinks = queries(4, layout.width), jnp.linspace(-2, 2, HEADS)
    got = attend(query, chosen, other, sinks=sinks)
    assert_close(got, by_hand(query, dense, other_dense, sinks=sinks))


def bytes_and_numbers(layout, ids, lengths, pages=20, page=3) -> tuple[Selection, Selection]:
    """A pool of bytes, NaN in every row nobody lists, and the same rows as numbers."""
    rng = np.random.default_rng(len(ids))
    slots = np.unique(ids[(ids >= 0) & (ids < pages * page)])
    # Blocks of many sizes, so that each scale matters.
    size = np.repeat(2.0 ** rng.integers(-6, 3, (len(slots), layout.width // 64)), 64, axis=1)
    rows = jnp.asarray(rng.standard_normal((len(slots), layout.width)) * size, jnp.bfloat16)
    pool = jnp.full_like(empty_pages(pages, page, layout), 255)
    pool = write(pool, jnp.asarray(slots), rows, layout, page)
    numbers = read(pool, jnp.arange(pages * page), layout, page)
    ids, lengths = jnp.asarray(ids, jnp.int32), jnp.asarray(lengths)
    return (
        Selection(pool, ids, lengths, page_size=page),
        Selection(numbers.reshape(pages, page, -1), ids, lengths),
    )


def test_large_scores_do_not_overflow(attend):
    query, chosen = queries(2), selection(lists(2, 140))
    case = query * 40, dataclasses.replace(chosen, pool=chosen.pool * 10)
    assert_close(attend(*case), by_hand(*case))


def test_a_token_with_nan_leaves_the_others_alone(attend):
    query, chosen = queries(3), selection(lists(3, 70))
    want = by_hand(query, chosen)
    out, lse = attend(query.at[1].set(jnp.nan), chosen)
    assert np.isnan(np.asarray(out[1], np.float32)).all()
    keep = np.array([0, 2])
    assert_close((out[keep], lse[keep]), (want[0][keep], want[1][keep]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("width", "splits", "share_keys"), [(512, 1, False), (576, 2, False), (512, 1, True)]
)
def test_the_kernel_pairs_tiles_of_two_ragged_lists(interpreted, width, splits, share_keys):
    # Two pairs of tiles each: three tiles and none, the first without a row; one tile and two.
    ids = lists(2, 130)
    ids[0, :70] = -1
    ids[1, 1:] = JUNK[0]
    window = selection(ids, [130, 1], width=width)
    other = selection(lists(2, 70, 5, 60), [0, 65], pages=20, page=3, width=width, seed=6)
    query = queries(2, width, heads=128 if share_keys else 64)
    sinks = jnp.linspace(-2, 2, query.shape[1]).at[0].set(jnp.inf).at[1].set(-jnp.inf)
    got = interpreted(query, window, other, sinks=sinks, splits=splits, share_keys=share_keys)
    assert_close(got, by_hand(query, window, other, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [V3_2, V4], ids=["v3.2", "v4"])
@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_that_share_their_keys_repeat_bitwise(layout, splits):
    ids = lists(5, 700, rows=60)
    ids[2, :300] = -1
    chosen, dense = bytes_and_numbers(layout, ids, [700, 700, 700, 0, 1])
    query, sinks = queries(5, layout.width, 128), jnp.linspace(-2, 2, 128)

    def run():
        options = {"share_keys": True, "splits": splits}
        return mosaic_gpu.sparse_mla(query, (chosen,), sinks, SM_SCALE, **options)

    first, again = run(), run()
    assert_close(first, by_hand(query, dense, sinks=sinks))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_where_bytes_wait_changes_nothing(splits):
    ids = lists(5, 700, rows=60)
    ids[2, :300] = -1
    chosen, _ = bytes_and_numbers(V4, ids, [700, 700, 700, 0, 1])
    case = queries(5), (chosen,), jnp.linspace(-2, 2, HEADS), SM_SCALE
    ring, registers = (
        mosaic_gpu.sparse_mla(*case, splits=splits, ring=where) for where in (True, False)
    )
    for one, other in zip(ring, registers, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 3, 16])
def test_splitting_the_keys_changes_nothing(splits):
    ids = lists(4, 700)
    ids[1, :300] = -1
    window = selection(ids, [700, 700, 0, 1])
    other = selection(lists(4, 140, 5, 60), [140, 0, 0, 65], pages=20, page=3, seed=6)
    query, sinks = queries(4), jnp.linspace(-2, 2, HEADS).at[0].set(jnp.inf)
    got = mosaic_gpu.sparse_mla(query, (window, other), sinks, SM_SCALE, splits=splits)
    assert_close(got, by_hand(query, window, other, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_agree_with_the_reference_and_repeat_bitwise(name):
    shape = SHAPES[name]
    query, selections, sinks = random_operands(shape)
    got = mosaic_gpu.sparse_mla(query, selections, sinks, SM_SCALE)
    again = mosaic_gpu.sparse_mla(query, selections, sinks, SM_SCALE)
    want = sparse_mla(query, *selections, sinks=sinks, sm_scale=SM_SCALE, implementation="xla")
    for mine, same, theirs in zip(got, again, want, strict=True):
        np.testing.assert_array_equal(mine, same)
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(np.isfinite(mine), finite)
        error = np.linalg.norm(mine[finite] - theirs[finite]) / np.linalg.norm(theirs[finite])
        assert error < ROUNDING


@pytest.mark.gpu
def test_rows_past_four_gigabytes_are_found():
    pages = 2**32 // (64 * WIDTH * 2) + 1
    pool = jnp.zeros((pages, 64, WIDTH), jnp.bfloat16)
    row = jnp.linspace(-1, 1, WIDTH, dtype=jnp.bfloat16)
    pool = pool.at[-1, -1].set(row)
    chosen = Selection(pool, jnp.full((1, 1), pages * 64 - 1, jnp.int32))
    out, _ = sparse_mla(queries(1), chosen, sm_scale=SM_SCALE, implementation="mosaic")
    np.testing.assert_array_equal(out[0, 5], row)


def random_operands(shape: Shape) -> tuple[jax.Array, tuple[Selection, ...], jax.Array]:
    """Lists of random lengths, the first token's full and the second's empty."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    query = jax.random.normal(next(keys), (shape.tokens, shape.heads, shape.width), jnp.bfloat16)
    selections = []
    for entries in filter(None, (shape.keys, shape.extra)):
        pool = jax.random.normal(next(keys), (300, 64, shape.width), jnp.bfloat16)
        ids = jax.random.randint(next(keys), (shape.tokens, entries), -500, 300 * 64)
        lengths = jax.random.randint(next(keys), (shape.tokens,), 0, entries + 1)
        lengths = lengths.at[:2].set(jnp.asarray([entries, 0]))
        selections.append(Selection(pool, ids, lengths))
    return query * 2, tuple(selections), jnp.linspace(-2, 2, shape.heads)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("v3.2, 1024 tokens, 64 heads", None, {}),
        ("v3.2, 1024 tokens", V3_2, {"share_keys": True}),
        ("v4-flash, 8 tokens", V4, {"ring": False}),
        ("v4-flash, 8 tokens", V4, {"ring": True}),
    ],
)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name, layout, options):
    shape = SHAPES[name]
    query = jax.ShapeDtypeStruct((shape.tokens, shape.heads, shape.width), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((1024, 64, shape.width), jnp.bfloat16)
    if layout is not None:
        pool = jax.eval_shape(lambda: empty_pages(1024, 64, layout))
    lengths = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32)
    selections = tuple(
        Selection(pool, jax.ShapeDtypeStruct((shape.tokens, entries), jnp.int32), lengths, 64)
        for entries in (shape.keys, shape.extra)
        if entries
    )
    assert mosaic_gpu.unsupported(query, selections, VALUE_WIDTH) is None
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32)
    run = functools.partial(mosaic_gpu.sparse_mla, sm_scale=SM_SCALE, **options)
    assert "mosaic_gpu" in lowered_for_hopper(run, query, selections, sinks)


def test_only_small_launches_split_the_keys():
    assert mosaic_gpu.split_count(blocks=8, tiles=10) == 5
    assert mosaic_gpu.split_count(blocks=64, tiles=10) == 2
    assert mosaic_gpu.split_count(blocks=128, tiles=32) == 1
    assert mosaic_gpu.split_count(blocks=1, tiles=0) == 1


def test_keys_are_shared_by_blocks_two_by_two():
    case = queries(2, heads=64), (selection(lists(2, 3)),)
    with pytest.raises(ValueError, match="H is 64, wanted a multiple of 128"):
        mosaic_gpu.sparse_mla(*case, None, SM_SCALE, share_keys=True)


@pytest.mark.parametrize(("layout", "share_keys"), [(V3_2, False), (V4, True), (None, False)])
def test_a_ring_is_for_bytes_of_v4_that_no_other_block_shares(layout, share_keys):
    chosen = selection(lists(2, 3), width=layout.width if layout else WIDTH)
    if layout:
        chosen, _ = bytes_and_numbers(layout, lists(2, 3, rows=60), [3, 3])
    query = queries(2, layout.width if layout else WIDTH, heads=128)
    options = {"ring": True, "share_keys": share_keys}
    with pytest.raises(ValueError, match="ring is True, wanted False"):
        mosaic_gpu.sparse_mla(query, (chosen,), None, SM_SCALE, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "the dtype of query is float32, wanted bfloat16"),
        ({"tokens": 0}, "query has 0 tokens"),
        ({"heads": 16}, "H is 16, wanted a multiple of 64"),
        ({"width": 448}, "W is 448, wanted one of"),
        ({"value_width": 448}, "value_width is 448, wanted 512"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(change, says):
    sizes = {"dtype": jnp.bfloat16, "tokens": 1, "heads": 64, "width": 576, "value_width": 512}
    sizes |= change
    shape = (sizes["tokens"], sizes["heads"], sizes["width"])
    query = jax.ShapeDtypeStruct(shape, sizes["dtype"])
    assert says in (mosaic_gpu.unsupported(query, (), sizes["value_width"]) or "")


def test_the_kernel_says_which_pools_it_does_not_support():
    query = jax.ShapeDtypeStruct((1, 64, 512), jnp.bfloat16)
    numbers = selection(lists(1, 3))
    odd = dataclasses.replace(numbers, pool=jnp.zeros((2, 1752), jnp.uint8), page_size=3)
    assert "multiple of 16" in (mosaic_gpu.unsupported(query, (odd,), VALUE_WIDTH) or "")
    both = mosaic_gpu.unsupported(query, (numbers, odd), VALUE_WIDTH) or ""
    assert "the same of both" in both


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_mosaic_without_a_gpu_raises_and_the_default_falls_back():
    case = queries(1), selection(lists(1, 3))
    with pytest.raises(NotImplementedError, match="wanted a Hopper GPU"):
        sparse_mla(*case, sm_scale=SM_SCALE, implementation="mosaic")
    assert_close(jax.jit(functools.partial(sparse_mla, sm_scale=SM_SCALE))(*case), by_hand(*case))


def test_an_empty_list_is_a_list(attend):
    got = attend(queries(2), selection(np.zeros((2, 0))))
    assert not np.asarray(got[0], np.float32).any()
    assert np.isposinf(got[1]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query": np.asarray(queries(1))[0]}, "query has 2 axes"),
        ({"pool": np.zeros((2, 3, 500), jnp.bfloat16)}, r"keys.pool has shape \(2, 3, 500\)"),
        ({"pool": np.zeros((6, WIDTH), jnp.bfloat16)}, r"wanted \[N, R, 512\]"),
        (
            {"pool": np.zeros((2, 3, WIDTH), np.float32)},
            "dtype of keys.pool is float32, wanted that of query",
        ),
        ({"pool": np.zeros((0, 3, WIDTH), jnp.bfloat16)}, "keys.pool has 0 rows"),
        ({"pool": np.zeros((2, 3, 656), np.uint8)}, "has rows of 576 numbers, wanted 512"),
        ({"pool": np.zeros((2, 1168), np.uint8)}, "keys.page_size is None, wanted 1 to 2"),
        ({"pool": np.zeros((2, 1168), np.uint8), "page_size": 3}, "page_size is 3, wanted 1 to"),
        ({"indices": np.zeros((2, 4), np.int32)}, r"keys.indices have shape \(2, 4\)"),
        ({"lengths": np.zeros(3, np.int32)}, r"keys.lengths have shape \(3,\)"),
        ({"page_size": 4}, "keys.page_size is 4, wanted 1 to 3"),
        ({"sinks": np.zeros(3, np.float32)}, rf"sinks have shape \(3,\), wanted \({HEADS},\)"),
        ({"sm_scale": -1.0}, "sm_scale is -1.0"),
        ({"value_width": 600}, "value_width is 600, wanted 1 to 512"),
        ({"implementation": "triton"}, "implementation is 'triton'"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, says):
    fields = {"pool": np.zeros((2, 3, WIDTH), jnp.bfloat16), "indices": np.zeros((1, 4), np.int32)}
    fields |= {"lengths": None, "page_size": None}
    given = {"query": queries(1), "sm_scale": SM_SCALE} | change
    fields |= {name: given.pop(name) for name in tuple(given) if name in fields}
    with pytest.raises(ValueError, match=says):
        sparse_mla(given.pop("query"), Selection(**fields), **given)


def test_the_second_selection_is_checked_by_its_own_name():
    keys = selection(lists(1, 4))
    extra = dataclasses.replace(keys, pool=keys.pool[..., :500])
    with pytest.raises(ValueError, match=r"extra.pool has shape"):
        sparse_mla(queries(1), keys, extra, sm_scale=SM_SCALE)
