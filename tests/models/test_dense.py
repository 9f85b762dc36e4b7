"""The dense decoder against recorded references, and the promises of the target protocol."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike
from safetensors.numpy import load_file

from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.models import dense, ragged
from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import Mixed, Packed
from dspark_jax.models.weights import DenseCache

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 2e-4
CAPACITY = 64

compiled = jax.jit(dense.forward, static_argnums=0, static_argnames="taps")
# Every operation outside of a jitted function is a program to compile for each of its shapes.
init_cache = jax.jit(dense.init_cache, static_argnums=(0, 1, 2, 3))
rectangle = jax.jit(ragged.rectangle)
compact = jax.jit(ragged.compact, static_argnums=3)


def forward(config, weights, cache, batch, taps=()) -> tuple[np.ndarray, np.ndarray, DenseCache]:
    """Hidden rows and taps on the host, where taking parts of them compiles nothing."""
    *rows, cache = compiled(config, weights, cache, batch, taps=taps)
    return *jax.device_get(rows), cache


@pytest.fixture(scope="module", params=["llama_tiny", "qwen3_tiny"])
def target(request: pytest.FixtureRequest) -> LoadedTarget:
    return load_target(GOLDEN / request.param, "float32")


@pytest.fixture(scope="module")
def golden(target: LoadedTarget) -> dict[str, np.ndarray]:
    return load_file(Path(target.name) / "golden.safetensors")


"""For promises about where rows lie, which the code of both families keeps: a layer with norms of
queries and keys differs within a row. Windows of such layers are ``decode``'s to test."""


def empty_cache(target: LoadedTarget, slots: int) -> DenseCache:
    return init_cache(target.config, slots, CAPACITY, jnp.float32)


def whole(tokens: ArrayLike, slots: jax.Array | None = None) -> Packed:
    """Every row of ``tokens`` from position 0."""
    rows = np.asarray(tokens, np.int32)
    count = np.full(rows.shape[0], rows.shape[1], np.int32)
    return rectangle(rows, np.zeros_like(count), count, slots)


def prefilled(target: LoadedTarget, tokens: np.ndarray) -> DenseCache:
    _, _, cache = forward(
        target.config, target.weights, empty_cache(target, len(tokens)), whole(tokens)
    )
    return dense.commit(target.config, cache, jnp.full(len(tokens), tokens.shape[1]))


def largest_error(found: jax.Array, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found) - wanted), initial=0.0))


def test_logits_agree_with_the_reference(target, golden):
    ids = golden["input_ids"]
    hidden, _, _ = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    logits = dense.unembed(target.config, target.weights, hidden).reshape(golden["logits"].shape)
    assert logits.dtype == jnp.float32
    assert largest_error(logits, golden["logits"]) < TOLERANCE


def test_a_tap_is_the_raw_output_of_its_layer(target, golden):
    """Entry i+1 of the reference's hidden states is layer i, before any norm."""
    ids, states = golden["input_ids"], golden["hidden_states"]
    taps = tuple(range(-1, target.config.num_hidden_layers - 1))
    hidden, tapped, _ = forward(
        target.config, target.weights, empty_cache(target, 2), whole(ids), taps=taps
    )
    tapped = tapped.reshape(2, ids.shape[1], len(taps), -1)
    for index, tap in enumerate(taps):
        assert largest_error(tapped[:, :, index], states[tap + 1]) < TOLERANCE, f"tap {tap}"
    assert largest_error(hidden.reshape(states[-1].shape), states[-1]) < TOLERANCE


def test_taps_come_in_the_order_asked(target, golden):
    run = functools.partial(
        forward, target.config, target.weights, empty_cache(target, 2), whole(golden["input_ids"])
    )
    every = tuple(range(-1, target.config.num_hidden_layers - 1))
    _, ordered, _ = run(taps=every)
    _, swapped, _ = run(taps=(1, -1))
    by_tap = dict(zip(every, np.split(ordered, len(every), axis=-1), strict=True))
    np.testing.assert_array_equal(swapped, np.concatenate([by_tap[1], by_tap[-1]], axis=-1))


@pytest.mark.parametrize("tap", [-2, 99])
def test_a_tap_outside_the_model_is_refused(target, tap):
    with pytest.raises(ValueError, match=rf"tap {tap} .*wanted -1"):
        forward(
            target.config,
            target.weights,
            empty_cache(target, 1),
            whole(np.ones((1, 1))),
            taps=(tap,),
        )


def test_greedy_tokens_agree_one_at_a_time(target, golden):
    expected = golden["greedy"][0]
    prompt = golden["input_ids"][:1]
    np.testing.assert_array_equal(expected[: prompt.shape[1]], prompt[0])
    hidden, _, cache = forward(target.config, target.weights, empty_cache(target, 1), whole(prompt))
    found = []
    for position in range(prompt.shape[1], len(expected)):
        token = jnp.argmax(dense.unembed(target.config, target.weights, hidden[-1]))
        found.append(int(token))
        cache = dense.commit(target.config, cache, jnp.array([position]))
        step = rectangle(token[None, None].astype(jnp.int32), jnp.array([position]), jnp.ones(1))
        hidden, _, cache = forward(target.config, target.weights, cache, step)
    assert found == expected[prompt.shape[1] :].tolist()


def test_a_text_in_chunks_equals_the_whole(target, golden):
    ids = golden["input_ids"]
    wanted, _, full = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    cache, pieces, width = empty_cache(target, 2), [], 7
    for start in range(0, ids.shape[1], width):
        chunk = ids[:, start : start + width]
        count = jnp.asarray([chunk.shape[1]] * 2)
        chunk = np.pad(chunk, ((0, 0), (0, width - chunk.shape[1])), constant_values=3)
        rows = rectangle(jnp.asarray(chunk, jnp.int32), jnp.asarray([start] * 2), count)
        hidden, _, cache = forward(target.config, target.weights, cache, rows)
        pieces.append(hidden.reshape(2, width, -1)[:, : int(count[0])])
    assert largest_error(np.concatenate(pieces, axis=1).reshape(wanted.shape), wanted) < 1e-5
    for found, expected in zip(cache.keys + cache.values, full.keys + full.values, strict=True):
        assert largest_error(found, expected) < 1e-5


def test_a_compact_batch_equals_the_rectangle(target, golden):
    """Windows of 3, 0, 1 and 5 rows: packed tight into 12 rows, or spread over 4 x 5."""
    ids = np.concatenate([golden["input_ids"]] * 2)
    start, count = jnp.array([20, 20, 11, 30]), jnp.array([3, 0, 1, 5])
    cache = prefilled(target, ids)
    window = jnp.asarray(ids[:, 5:10][::-1], jnp.int32)
    spread, tight = rectangle(window, start, count), compact(window, start, count, 12)
    wide, _, wide_cache = forward(target.config, target.weights, cache, spread)
    narrow, _, narrow_cache = forward(target.config, target.weights, cache, tight)
    wide, narrow = wide.reshape(4, 5, -1), tight.unpack(narrow)
    for request in range(4):
        rows = slice(0, int(count[request]))
        assert largest_error(narrow[request, rows], wide[request, rows]) < 1e-5
    for tight_rows, wide_rows in zip(
        narrow_cache.keys + narrow_cache.values, wide_cache.keys + wide_cache.values, strict=True
    ):
        assert largest_error(tight_rows, wide_rows) < 1e-5


@pytest.mark.parametrize("packing", ["rectangle", "compact"])
def test_scratch_rows_and_padding_leave_no_trace(target, golden, packing):
    """NaN in every row past the committed ones changes no output and stays where it was."""
    ids = golden["input_ids"]
    clean = prefilled(target, ids)
    length = jnp.array([25, 40])
    scratch = jnp.arange(CAPACITY)[None, :] >= length[:, None]

    def poison(rows: jax.Array) -> jax.Array:
        return jnp.where(scratch[:, None, :, None], jnp.nan, rows)

    poisoned = DenseCache(
        tuple(map(poison, clean.keys)), tuple(map(poison, clean.values)), clean.length
    )
    window, count = jnp.asarray(ids[:, :6], jnp.int32), jnp.array([4, 0])
    batch = (
        rectangle(window, length, count)
        if packing == "rectangle"
        else compact(window, length, count, 8)
    )
    wanted, _, _ = forward(target.config, target.weights, clean, batch)
    found, _, after = forward(target.config, target.weights, poisoned, batch)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, wanted)
    for before, rows in zip(
        poisoned.keys + poisoned.values, after.keys + after.values, strict=True
    ):
        written = np.isfinite(rows) & ~np.isfinite(before)
        changed = sorted(set(zip(*np.nonzero(written.any(axis=(1, 3))), strict=True)))
        assert changed == [(0, position) for position in range(25, 29)]
        np.testing.assert_array_equal(rows[1], before[1])


def test_rows_past_the_capacity_write_nothing(target, golden):
    ids = golden["input_ids"]
    cache = prefilled(target, ids)
    window = jnp.asarray(ids[:, :4], jnp.int32)
    batch = rectangle(window, jnp.array([CAPACITY - 2, CAPACITY + 5]), jnp.array([4, 4]))
    _, _, after = forward(target.config, target.weights, cache, batch)
    cache, after = jax.device_get((cache, after))
    for before, rows in zip(cache.keys, after.keys, strict=True):
        np.testing.assert_array_equal(rows[0, :, : CAPACITY - 2], before[0, :, : CAPACITY - 2])
        np.testing.assert_array_equal(rows[1], before[1])


def test_a_sub_batch_fills_only_its_slots(target, golden):
    """Prompts go to slots 3 and 1; a third request, out of range, is padding."""
    ids = golden["input_ids"]
    wanted, _, alone = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    slots = 4
    marked = DenseCache(
        tuple(jnp.full((slots, *rows.shape[1:]), 7.0) for rows in alone.keys),
        tuple(jnp.full((slots, *rows.shape[1:]), 7.0) for rows in alone.values),
        jnp.zeros(slots, jnp.int32),
    )
    tokens = np.concatenate([ids, ids[:1]])
    found, _, cache = forward(
        target.config, target.weights, marked, whole(tokens, jnp.array([3, 1, slots]))
    )
    cache, alone = jax.device_get((cache, alone))
    count = ids.shape[1]
    assert largest_error(found[: 2 * count], wanted) < 1e-5
    assert np.isfinite(found).all()
    for rows, single in zip(cache.keys + cache.values, alone.keys + alone.values, strict=True):
        for source, slot in ((0, 3), (1, 1)):
            assert largest_error(rows[slot, :, :count], single[source, :, :count]) < 1e-5
            assert (rows[slot, :, count:] == 7.0).all()
        assert (rows[[0, 2]] == 7.0).all()


def in_pages(target: LoadedTarget, slots: int) -> DenseCache:
    """An empty paged cache whose slots own shuffled pages; nobody owns the last one."""
    pool = PagePool(count=slots * 4 + 1, size=CAPACITY // 4, columns=4)
    cache = dense.init_pages(target.config, slots, pool, jnp.float32)
    table = np.random.default_rng(0).permutation(slots * 4).reshape(slots, 4)
    return cache.replace(table=jnp.asarray(table, jnp.int32))


def test_a_text_in_pages_equals_a_text_in_one(target, golden):
    ids = golden["input_ids"]
    wanted, _, _ = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    cache = in_pages(target, 2)
    assert cache.capacity == CAPACITY
    found, _, cache = forward(target.config, target.weights, cache, whole(ids))
    assert largest_error(found, wanted) < 1e-5
    assert not any(rows[-1].any() for rows in cache.keys + cache.values)


def test_a_prompt_in_pieces_beside_the_window_of_another_equals_each_alone(target, golden):
    """Slot 0 decodes 3 rows; two pieces of one prompt, and a padding piece, go to slot 1."""
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    start, count = jnp.array([20, 0]), jnp.array([3, 0])
    window = compact(ids[:, 20:24], start, count, 5)
    prompt = rectangle(
        jnp.stack([ids[1, :6], ids[1, 6:12], ids[1, :6]]),
        jnp.array([0, 6, 0]),
        jnp.array([6, 5, 0]),
        jnp.array([1, 1, 2]),
    )
    _, _, cache = forward(
        target.config,
        target.weights,
        in_pages(target, 2),
        rectangle(ids[:, :20], jnp.zeros(2, jnp.int32), jnp.array([20, 0])),
    )
    both = Mixed((window, prompt))
    found, tapped, _ = forward(target.config, target.weights, cache, both, taps=(-1,))
    alone, _, _ = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    alone = alone.reshape(*ids.shape, -1)
    assert largest_error(found[:3], alone[0, 20:23]) < 1e-5
    assert largest_error(found[5:16], alone[1, :11]) < 1e-5
    assert np.isfinite(found).all()
    assert tapped.shape[0] == both.tokens.shape[0] == 5 + 18


def test_forward_leaves_the_length_to_commit(target, golden):
    ids = golden["input_ids"]
    _, _, cache = forward(target.config, target.weights, empty_cache(target, 2), whole(ids))
    assert cache.length.tolist() == [0, 0]
    assert dense.commit(target.config, cache, jnp.array([3, 9])).length.tolist() == [3, 9]


def test_a_tied_head_is_the_embedding(target):
    head = dense.output_embedding(target.weights)
    embedding = dense.input_embedding(target.weights)
    assert (head is embedding) == target.config.tie_word_embeddings


def test_a_donated_cache_is_updated_in_place(target, golden):
    """The compiled program aliases every cache array and copies none of them."""
    cache = empty_cache(target, 2)
    batch = whole(golden["input_ids"][:, :4])
    step = jax.jit(dense.forward, static_argnums=0, static_argnames="taps", donate_argnums=2)
    text = step.lower(target.config, target.weights, cache, batch, taps=()).compile().as_text()
    assert text is not None
    shape = "f32[" + ",".join(map(str, cache.keys[0].shape)) + "]"
    assert text.count("may-alias") + text.count("must-alias") >= 2 * len(cache.keys)
    assert shape in text
    assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]


def test_bfloat16_stays_near_float32(target, golden):
    half = load_target(target.name, "bfloat16")
    ids = golden["input_ids"]
    cache = dense.init_cache(half.config, 2, CAPACITY, jnp.bfloat16)
    hidden, _, cache = forward(half.config, half.weights, cache, whole(ids))
    assert hidden.dtype == jnp.bfloat16
    assert {rows.dtype for rows in cache.keys + cache.values} == {jnp.dtype(jnp.bfloat16)}
    logits = dense.unembed(half.config, half.weights, hidden).reshape(golden["logits"].shape)
    assert logits.dtype == jnp.float32
    spread = np.sqrt(np.mean((np.asarray(logits) - golden["logits"]) ** 2))
    assert spread < 0.03 * np.std(golden["logits"])
