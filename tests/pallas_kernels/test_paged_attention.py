"""Paged attention: one suite over every implementation, and legality of the kernel on Hopper."""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.paged_attention import live_rows, mosaic_gpu, paged_attention, reference
from pallas_kernels.paged_attention.mosaic_gpu import Tuning
from pallas_kernels.paged_attention.shapes import SHAPES, SWEPT

Attend = Callable[..., jax.Array]
ROUNDING = 5e-3


def interpreted(query, keys, values, position, slots=None, table=None, rows=None, *, splits=1):
    """The Mosaic kernel on the CPU, checked for races; the smallest ring, so that it wraps."""
    result = mosaic_gpu.paged_attention(
        query,
        keys,
        values,
        position,
        slots,
        table,
        rows,
        tuning=Tuning(tile=64, stages=2, splits=splits),
        interpret=InterpretGPUParams(detect_races=True),
    )
    result.block_until_ready()
    assert not interpret_pallas_call.get_races().races_found
    return result


@pytest.fixture(
    params=["xla", "live", "mosaic, interpreted", pytest.param("mosaic", marks=pytest.mark.gpu)]
)
def attend(request: pytest.FixtureRequest) -> Iterator[Attend]:
    if request.param == "mosaic, interpreted":
        yield interpreted
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        return

    @jax.jit
    def attend(*operands, rows=None):
        if request.param == "live" and rows is None:
            return live_rows.paged_attention(*operands, block=64)
        return paged_attention(*operands, rows=rows, implementation=request.param)

    def run(*operands: jax.Array, rows: jax.Array | None = None, splits: int = 1) -> jax.Array:
        del splits
        return attend(*operands, rows=rows)

    yield run


def operands(requests, width, heads, kv_heads, capacity, lengths, *, slots=None, head_dim=64):
    """Random bf16 operands whose last query is the last live row; NaN in every other cache row."""
    rng = np.random.default_rng(width + capacity + sum(lengths))
    lengths = np.asarray(lengths)
    position = lengths[:, None] - width + np.arange(width)
    position = np.where(position < 0, -1, position)
    query = rng.standard_normal((requests, width, heads, head_dim), np.float32) * 2
    cache = np.full((2, requests, kv_heads, capacity, head_dim), np.nan, np.float32)
    for request, length in enumerate(lengths):
        slot = request if slots is None else slots[request]
        if 0 <= slot < requests:
            live = rng.standard_normal((2, kv_heads, length, head_dim), np.float32)
            cache[:, slot, :, :length] = live
    # rounded on the host, where no shape is a program to compile
    case = (
        query.astype(jnp.bfloat16),
        *cache.astype(jnp.bfloat16),
        position.astype(np.int32),
        None if slots is None else np.asarray(slots, np.int32),
    )
    return jax.device_put(case)


def by_hand(query, keys, values, position, slots=None):
    """Each query row by itself, in NumPy at double precision."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    position = np.asarray(position)
    slots = np.arange(len(query)) if slots is None else np.asarray(slots)
    group = query.shape[2] // keys.shape[1]
    out = np.zeros_like(query)
    for a, w, h in np.ndindex(query.shape[:3]):
        if position[a, w] < 0 or not 0 <= slots[a] < len(keys):
            continue
        seen = slice(0, position[a, w] + 1)
        scores = keys[slots[a], h // group, seen] @ query[a, w, h] / math.sqrt(query.shape[3])
        weights = np.exp(scores - scores.max())
        out[a, w, h] = weights / weights.sum() @ values[slots[a], h // group, seen]
    return out


def in_pages(case, page_size):
    """The same case with the rows of each slot in pages of a shuffled pool, and no spare page."""
    query, keys, values, position, slots = case
    count, heads, capacity, width = keys.shape
    used = np.asarray(position).max(axis=1) // page_size + 1
    table = np.full((count, capacity // page_size), -1, np.int32)
    owners = np.arange(count) if slots is None else np.asarray(slots)
    wanted = [(s, c) for s, n in zip(owners, used, strict=True) if 0 <= s < count for c in range(n)]
    order = np.random.default_rng(0).permutation(len(wanted))
    pools = np.zeros((2, len(wanted), heads, page_size, width), np.float32)
    for page, (slot, column) in zip(order, wanted, strict=True):
        table[slot, column] = page
        rows = slice(column * page_size, (column + 1) * page_size)
        pools[:, page] = keys[slot, :, rows], values[slot, :, rows]
    return query, *jax.device_put((*pools.astype(keys.dtype),)), position, slots, jnp.asarray(table)


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("width", range(1, 9))
def test_the_reference_is_softmax_attention(width):
    query, keys, values, position, _ = operands(2, width, 6, 2, 40, [width, 33])
    query, keys, values = (x.astype(jnp.float32) for x in (query, keys, values))
    got = jax.jit(reference.paged_attention)(query, keys, values, position, None)
    assert got.dtype == jnp.float32
    assert relative_error(got, by_hand(query, keys, values, position)) < 1e-6


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("width", "lengths"), [(1, [130]), (8, [193])])
def test_queries_attend_to_the_rows_up_to_their_own(attend, width, lengths):
    case = operands(1, width, 3, 1, 256, lengths)
    got = attend(*case)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, by_hand(*case)) < ROUNDING


@pytest.mark.timeout(60)
def test_heads_read_their_own_group_and_requests_their_own_slot(attend):
    case = operands(3, 2, 6, 2, 64, [7, 64, 30], slots=[2, 0, 1])
    assert relative_error(attend(*case), by_hand(*case)) < ROUNDING


@pytest.mark.timeout(60)
def test_padding_rows_and_padding_requests_get_zeros(attend):
    query, keys, values, position, slots = operands(3, 2, 3, 1, 64, [9, 20, 33], slots=[0, 3, -1])
    position = position.at[0, 1].set(-1)
    query = query.at[0, 1].set(jnp.nan)
    got = attend(query, keys, values, position, slots)
    assert not np.asarray(got[0, 1], np.float32).any()
    assert not np.asarray(got[1:], np.float32).any()
    assert relative_error(got, by_hand(query, keys, values, position, slots)) < ROUNDING


@pytest.mark.timeout(60)
def test_a_large_score_does_not_overflow(attend):
    query, keys, values, position, _ = operands(1, 1, 1, 1, 128, [100])
    case = (query * 100, keys * 10, values, position)
    assert relative_error(attend(*case), by_hand(*case)) < ROUNDING


@pytest.mark.timeout(60)
def test_splitting_the_keys_changes_nothing(attend):
    # Three tiles in two splits, and one tile, which leaves the second split without any.
    case = operands(2, 4, 2, 1, 256, [150, 40])
    assert relative_error(attend(*case, splits=2), by_hand(*case)) < ROUNDING


@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [None, [1, 2, 0]])
def test_rows_are_found_through_the_page_table(attend, slots):
    case = operands(3, 2, 3, 1, 256, [130, 64, 193], slots=slots)
    paged = in_pages(case, page_size=128 if slots is None else 64)
    assert relative_error(attend(*paged), by_hand(*case)) < ROUNDING


@pytest.mark.timeout(60)
@pytest.mark.parametrize("splits", [1, 2])
def test_packed_queries_attend_as_those_side_by_side(attend, splits):
    query, keys, values, position, _ = operands(3, 4, 6, 2, 192, [9, 130, 70])
    # ten rows; absent queries have rows of their own, but for one that has none
    rows = jnp.asarray([[4, 9, 8, 6], [0, 1, 2, 3], [5, 7, 10, 11]], jnp.int32)
    absent = jnp.asarray([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]], bool)
    position = jnp.where(absent, -1, position)
    packed = jnp.full((10, 6, 64), jnp.nan, query.dtype).at[rows].set(query, mode="drop")
    got = np.asarray(attend(packed, keys, values, position, rows=rows, splits=splits), np.float32)
    want = by_hand(query, keys, values, position)
    assert got.shape == packed.shape
    for request, number in np.ndindex(rows.shape):
        row = int(rows[request, number])
        if row >= len(packed):
            continue
        if absent[request, number]:
            assert not got[row].any()
        else:
            assert relative_error(got[row], want[request, number]) < ROUNDING


@pytest.mark.parametrize("length", [0, 64, 65, 150])
def test_a_cache_that_ends_inside_a_block_is_read_once(length):
    case = operands(1, 2, 3, 1, 150, [length])
    got = jax.jit(functools.partial(live_rows.paged_attention, block=64))(*case)
    if length:
        assert relative_error(got, by_hand(*case)) < ROUNDING
    else:
        assert not np.asarray(got, np.float32).any()


def test_a_request_is_the_same_to_the_bit_beside_a_longer_one():
    query, keys, values, position, _ = operands(2, 2, 3, 1, 256, [70, 256])
    attend = jax.jit(functools.partial(live_rows.paged_attention, block=64))
    alone = attend(query, keys, values, position.at[1].set(-1))
    np.testing.assert_array_equal(attend(query, keys, values, position)[0], alone[0])


def test_a_cache_of_one_block_is_not_looped_over():
    _, keys, _, _, _ = operands(1, 2, 3, 1, 128, [9])
    assert "128 rows a slot" in (live_rows.unsupported(keys, None) or "")
    assert live_rows.unsupported(keys, jnp.zeros((1, 2), jnp.int32)) is None


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(name):
    assert lowers(name, mosaic_gpu.DEFAULT)


@pytest.mark.parametrize("name", SWEPT)
def test_the_kernel_lowers_for_hopper_with_pages(name):
    assert lowers(name, mosaic_gpu.DEFAULT, page_size=64)


@pytest.mark.parametrize("splits", [None, 2])
def test_the_kernel_lowers_for_hopper_with_packed_queries(splits):
    assert lowers(SWEPT[-1], Tuning(splits=splits), page_size=64, packed=True)


@pytest.mark.parametrize("tuning", [Tuning(128, 2), Tuning(64, 4), Tuning(splits=3)])
def test_other_tunings_lower_for_hopper(tuning):
    assert lowers(SWEPT[-1], tuning)


def lowers(
    name: str, tuning: Tuning, page_size: int | None = None, *, packed: bool = False
) -> bool:
    shape = SHAPES[name]
    rows = (shape.requests, shape.width, shape.heads, shape.head_dim)
    columns = shape.capacity // (page_size or shape.capacity)
    cache = (shape.requests * columns, shape.kv_heads, shape.capacity // columns, shape.head_dim)
    table = jax.ShapeDtypeStruct((shape.requests, columns), jnp.int32)
    query = (rows[0] * rows[1] // 2, *rows[2:]) if packed else rows
    specs = (
        jax.ShapeDtypeStruct(query, jnp.bfloat16),
        jax.ShapeDtypeStruct(cache, jnp.bfloat16),
        jax.ShapeDtypeStruct(cache, jnp.bfloat16),
        jax.ShapeDtypeStruct(rows[:2], jnp.int32),
        jax.ShapeDtypeStruct(rows[:1], jnp.int32),
        table if page_size else None,
        jax.ShapeDtypeStruct(rows[:2], jnp.int32) if packed else None,
    )
    assert mosaic_gpu.unsupported(*specs[:4], specs[5], tuning) is None
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(
            lambda *case: mosaic_gpu.paged_attention(*case, tuning=tuning),
        ).trace(*specs)
        return "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_only_small_launches_split_the_keys():
    assert mosaic_gpu.split_count(blocks=3, capacity=2048, tile=64) == 8
    assert mosaic_gpu.split_count(blocks=3, capacity=256, tile=64) == 1
    assert mosaic_gpu.split_count(blocks=192, capacity=2048, tile=64) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "dtype of query is float32"),
        ({"head_dim": 80}, "E is 80"),
        ({"width": 22}, "W*H/N are 66"),
        ({"capacity": 100}, "P are 100"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(change, says):
    sizes = {"dtype": jnp.bfloat16, "head_dim": 64, "width": 8, "capacity": 128} | change
    query = jnp.zeros((1, sizes["width"], 3, sizes["head_dim"]), sizes["dtype"])
    keys = jnp.zeros((1, 1, sizes["capacity"], sizes["head_dim"]), sizes["dtype"])
    position = jnp.zeros((1, sizes["width"]), jnp.int32)
    assert says in (mosaic_gpu.unsupported(query, keys, keys, position) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_mosaic_without_a_gpu_raises_and_the_default_falls_back():
    case = operands(1, 2, 3, 1, 64, [9])
    with pytest.raises(NotImplementedError, match="wanted a Hopper GPU"):
        paged_attention(*case, implementation="mosaic")
    fallback = jax.jit(paged_attention)(*case)
    assert relative_error(fallback, by_hand(*case)) < ROUNDING


def test_shapes_that_disagree_are_refused():
    query, keys, values, position, _ = operands(2, 2, 3, 1, 64, [9, 9])
    with pytest.raises(ValueError, match="2 requests and the cache 1 slots"):
        paged_attention(query, keys[:1], values[:1], position)
    with pytest.raises(ValueError, match="wanted that of keys"):
        paged_attention(query, keys, values[:, :, :32], position)
    with pytest.raises(ValueError, match="position has shape"):
        paged_attention(query, keys, values, position[:, :1])
    with pytest.raises(ValueError, match="2 requests and the cache 3 slots"):
        paged_attention(query, keys, values, position, None, jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"query and keys have 4 and 4 axes, wanted \[T, H, E\]"):
        paged_attention(query, keys, values, position, rows=position)
    with pytest.raises(ValueError, match="rows have shape"):
        paged_attention(query[0], keys, values, position, rows=position[:1])
    with pytest.raises(ValueError, match="table has shape"):
        paged_attention(query, keys, values, position, None, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="implementation is 'triton'"):
        paged_attention(query, keys, values, position, implementation="triton")  # type: ignore
