"""The DeepSeek-V3.2 decoder: what its cache holds, whom a token attends to, whatever the batch.

The recorded tensors themselves are compared by ``dspark check`` (tests/cli/test_check.py). Here a
text is 34 tokens long, of which a token attends to 8, in the first two layers of that model: one
with an MLP, one with experts.
"""

import dataclasses
import functools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.models.deepseek_v32 import model
from dspark_jax.models.deepseek_v32.indexer import choose_rows
from dspark_jax.models.deepseek_v32.places import find_places
from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import Mixed, compact, rectangle

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v32_tiny"
SLOTS, WIDTH, ROWS, PAGE = 3, 8, 40, 4
LENGTH = 34
NEAR = 1e-5


def first_layers(count, dtype):
    """The recorded model without its last layers: one with an MLP, then some with experts."""
    target = load_target(GOLDEN, dtype)
    config = dataclasses.replace(target.config, num_hidden_layers=count)
    return config, target.weights.replace(layers=target.weights.layers[:count])


CONFIG, WEIGHTS = first_layers(2, "float32")
RANDOM = np.random.default_rng(3)
TEXT = RANDOM.integers(0, CONFIG.vocab_size, (SLOTS, LENGTH + WIDTH)).astype(np.int32)
# three requests in turn, page by page from the end, as a pool looks after a while
SCRAMBLED = np.arange(SLOTS * ROWS // PAGE).reshape(-1, SLOTS).T[:, ::-1].astype(np.int32)
SPARE = 2

forward = functools.partial(
    jax.jit(model.forward, static_argnums=0, static_argnames="taps"), taps=()
)


def empty(kind):
    if kind == "contiguous":
        return model.init_cache(CONFIG, SLOTS, ROWS, jnp.float32)
    pool = PagePool(count=SCRAMBLED.size + SPARE, size=PAGE, columns=ROWS // PAGE)
    return model.init_pages(CONFIG, SLOTS, pool, jnp.float32).replace(table=jnp.asarray(SCRAMBLED))


def rows_of(cache):
    """Every cached row of every request, ``[layers, S, K, numbers]``, found without the model."""
    layers = []
    for layer in cache.layers:
        both = np.concatenate([layer.latent, layer.index], axis=-1)
        layers.append(both if cache.table is None else both[np.asarray(cache.table)])
    return np.stack(layers).reshape(len(layers), SLOTS, ROWS, -1)


@jax.jit
def verify(cache, start, tokens, count):
    batch = compact(tokens, start, count, SLOTS * WIDTH)
    hidden, _, cache = model.forward(CONFIG, WEIGHTS, cache, batch)
    return batch.unpack(model.unembed(CONFIG, WEIGHTS, hidden)), cache


def window(cache, start, tokens, count):
    """One ragged batch: ``count`` rows of each request from ``start``; logits ``[S, WIDTH, V]``."""
    logits, cache = verify(cache, *(np.asarray(x, np.int32) for x in (start, tokens, count)))
    return np.asarray(logits), cache


def decoded(kind, tokens_of_step):
    """Rows and logits of every position when each step takes this many tokens of the text."""
    cache, start, logits = empty(kind), 0, []
    while start < LENGTH:
        take = min(tokens_of_step, LENGTH - start)
        tokens = TEXT[:, start : start + WIDTH]
        some, cache = window(cache, [start] * SLOTS, tokens, [take] * SLOTS)
        logits.append(some[:, :take])
        start += take
        cache = model.commit(CONFIG, cache, np.full(SLOTS, start, np.int32))
    return cache, np.concatenate(logits, axis=1)


@pytest.fixture(scope="module", params=["contiguous", "paged"])
def kind(request):
    return request.param


@functools.cache
def serial(kind):
    """One token at a time."""
    return decoded(kind, 1)


def test_pages_anywhere_hold_what_a_contiguous_cache_holds():
    plain, logits = serial("contiguous")
    paged, same = serial("paged")
    np.testing.assert_allclose(same, logits, atol=NEAR)
    np.testing.assert_allclose(
        rows_of(paged)[:, :, :LENGTH], rows_of(plain)[:, :, :LENGTH], atol=NEAR
    )
    for layer in paged.layers:
        assert not np.any(layer.latent[-SPARE:])
        assert not np.any(layer.index[-SPARE:])


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_accepted_prefix_of_any_window_leaves_the_rows_of_serial_decoding(kind, data):
    """Windows of 0 to 8 rows; rejected drafts are other tokens and stay behind as scratch.

    Starts below, at and past 8 rows (all are chosen, then some) and in every place of a page.
    """
    wanted, logits = serial(kind)
    draw = functools.partial(data.draw, st.integers(0, WIDTH))
    cache, start = empty(kind), np.zeros(SLOTS, np.int64)
    while start.min() < LENGTH:
        count = np.array([draw(label="width") for _ in range(SLOTS)])
        count[np.argmin(start)] = max(1, count[np.argmin(start)])
        accepted = np.array([draw(label="accepted") for _ in range(SLOTS)])
        accepted = np.minimum(np.maximum(accepted, 1), np.minimum(count, LENGTH - start))
        tokens = np.stack([text[at : at + WIDTH] for text, at in zip(TEXT, start, strict=True)])
        drafted = np.arange(WIDTH) >= accepted[:, None]
        tokens = np.where(drafted, (tokens + 1) % CONFIG.vocab_size, tokens)
        found, cache = window(cache, start, tokens, count)
        for slot in range(SLOTS):
            taken = accepted[slot]
            np.testing.assert_allclose(
                found[slot, :taken], logits[slot, start[slot] : start[slot] + taken], atol=NEAR
            )
        start = start + accepted
        cache = model.commit(CONFIG, cache, start.astype(np.int32))
    np.testing.assert_allclose(
        rows_of(cache)[:, :, :LENGTH], rows_of(wanted)[:, :, :LENGTH], atol=NEAR
    )


def test_every_request_of_a_ragged_batch_gets_what_it_gets_alone(kind):
    """Contexts shorter and longer than the choice, odd widths, in one batch and one by one."""
    cache, _ = serial(kind)
    start, count = np.array([2, 30, 17]), np.array([3, 5, 7])
    tokens = TEXT[::-1, :WIDTH]
    together, _ = window(cache, start, tokens, count)
    for slot in range(SLOTS):
        alone, _ = window(cache, start, tokens, np.where(np.arange(SLOTS) == slot, count, 0))
        np.testing.assert_allclose(
            alone[slot, : count[slot]], together[slot, : count[slot]], atol=NEAR
        )


def test_a_batch_without_rows_changes_nothing(kind):
    cache, _ = serial(kind)
    logits, after = window(cache, [0, 5, LENGTH], TEXT[:, :WIDTH], [0, 0, 0])
    assert np.isfinite(logits).all()
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_the_same_batch_twice_gives_the_same_bits(kind):
    cache, _ = serial(kind)
    first, one = window(cache, [8, 9, 31], TEXT[:, :WIDTH], [8, 1, 3])
    second, two = window(cache, [8, 9, 31], TEXT[:, :WIDTH], [8, 1, 3])
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_what_is_not_committed_leaves_no_trace(kind):
    """NaN in all scratch rows and in pages of nobody changes no bit of the result."""
    cache, _ = serial(kind)
    length = np.array([25, 4, 31])
    cache = model.commit(CONFIG, cache, length.astype(np.int32))
    scratch = np.arange(ROWS) >= length[:, None]
    if cache.table is not None:
        pages = np.ones((SCRAMBLED.size + SPARE, PAGE), bool)
        pages[SCRAMBLED] = scratch.reshape(SLOTS, -1, PAGE)
        scratch = pages
    poisoned = cache.replace(
        layers=jax.tree.map(lambda rows: jnp.where(scratch[..., None], jnp.nan, rows), cache.layers)
    )
    count = np.array([4, 0, 3])
    wanted, _ = window(cache, length, TEXT[:, :WIDTH], count)
    found, after = window(poisoned, length, TEXT[:, :WIDTH], count)
    np.testing.assert_array_equal(found, wanted)
    written = np.isfinite(rows_of(after)).all(axis=(0, 3))
    np.testing.assert_array_equal(written, np.arange(ROWS) < (length + count)[:, None])


def test_rows_past_the_capacity_write_nothing(kind):
    cache, _ = serial(kind)
    _, after = window(cache, [ROWS - 2, ROWS + 3, 0], TEXT[:, :WIDTH], [4, 4, 0])
    before, found = rows_of(cache), rows_of(after)
    np.testing.assert_array_equal(found[:, 0, : ROWS - 2], before[:, 0, : ROWS - 2])
    assert np.all(found[:, 0, ROWS - 2 :] != before[:, 0, ROWS - 2 :])
    np.testing.assert_array_equal(found[:, 1:], before[:, 1:])


def test_prompts_and_windows_share_a_pass():
    """A whole prompt, windows of 3 and 8 rows, and a request of no slot give what they give apart.

    The prompt goes to pages that held another one.
    """
    cache, logits = serial("paged")
    cache = cache.replace(
        length=jnp.array([LENGTH, LENGTH, 0]),
        layers=jax.tree.map(lambda rows: rows.at[SCRAMBLED[2]].set(7.0), cache.layers),
    )
    tokens = np.stack([TEXT[2, :LENGTH], TEXT[0, :LENGTH]])
    prompts = rectangle(tokens, np.array([0, 0]), np.array([LENGTH, 5]), np.array([2, SLOTS]))
    drafts = np.stack([TEXT[0, 9 : 9 + WIDTH], TEXT[1, 20 : 20 + WIDTH], TEXT[2, :WIDTH]])
    pack = jax.jit(compact, static_argnums=3)
    windows = pack(drafts, np.array([9, 20, 0]), np.array([3, 8, 0]), 12)
    hidden, _, after = forward(CONFIG, WEIGHTS, cache, Mixed((prompts, windows)))
    found = np.asarray(model.unembed(CONFIG, WEIGHTS, hidden))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:LENGTH], logits[2], atol=NEAR)
    windows = found[2 * LENGTH :]
    np.testing.assert_allclose(windows[:3], logits[0, 9:12], atol=NEAR)
    np.testing.assert_allclose(windows[3:11], logits[1, 20:28], atol=NEAR)
    wanted = rows_of(serial("paged")[0])[:, :, :LENGTH]
    np.testing.assert_allclose(rows_of(after)[:, :, :LENGTH], wanted, atol=NEAR)


def choose(config, index, start, count):
    """Rows that layer 0 chooses in a ragged batch of made-up queries, margins, and where it is."""
    random = np.random.default_rng(5)
    rows = SLOTS * WIDTH
    query = random.normal(size=(rows, CONFIG.index_n_heads, CONFIG.index_head_dim))
    hidden = random.normal(size=(rows, CONFIG.hidden_size))

    @jax.jit
    def run(cache, index, start, count, query, hidden):
        places = find_places(cache, compact(jnp.asarray(TEXT[:, :WIDTH]), start, count, rows))
        indexer = WEIGHTS.layers[0].attention.indexer
        phases = (jnp.ones((rows, CONFIG.qk_rope_head_dim // 2)),) * 2
        chosen, margin = choose_rows(config, indexer, index, places, hidden, query, phases)
        return chosen, margin, places.position, places.slot, places.ids(index, chosen)

    arguments = np.array(start), np.array(count), np.float32(query), np.float32(hidden)
    return map(np.asarray, run(serial("paged")[0], index, *arguments))


def test_nothing_is_scored_only_where_every_row_is_chosen_anyway():
    """A choice as large as the cache takes all visible rows; one smaller leaves a row out."""
    index = serial("paged")[0].layers[0].index
    start, count = [2, 30, 32], [3, 5, 8]
    everything = dataclasses.replace(CONFIG, index_topk=ROWS)
    all_rows, margin, positions, *_ = choose(everything, index, start, count)
    for row, position in enumerate(positions):
        assert set(all_rows[row][all_rows[row] >= 0]) == set(range(position + 1))
    assert np.isposinf(margin).all()
    all_but_one = dataclasses.replace(CONFIG, index_topk=ROWS - 1)
    fewer, margin, *_ = choose(all_but_one, index, start, count)
    last = positions == ROWS - 1
    assert last.sum() == 1
    assert ((fewer >= 0).sum(axis=1) == np.minimum((all_rows >= 0).sum(axis=1), ROWS - 1)).all()
    np.testing.assert_array_equal(np.isfinite(margin), last)


def test_rows_that_no_head_responds_to_tie():
    """Keys of zero all score 0: the latest rows are taken and the margin is 0."""
    index = jnp.zeros_like(serial("paged")[0].layers[0].index)
    chosen, margin, positions, *_ = choose(CONFIG, index, [2, 30, 17], [3, 5, 0])
    for row, position in enumerate(positions):
        taken = min(position + 1, CONFIG.index_topk)
        assert sorted(chosen[row][chosen[row] >= 0]) == list(
            range(position + 1 - taken, position + 1)
        )
        assert margin[row] == (0 if position + 1 > CONFIG.index_topk else np.inf)


def test_scores_that_are_not_numbers_choose_rows_the_token_may_see():
    """NaN everywhere in the index keys: every id stays inside the request's own visible rows."""
    index = jnp.full_like(serial("paged")[0].layers[0].index, jnp.nan)
    chosen, _, position, slots, ids = choose(CONFIG, index, [2, 30, 17], [3, 5, 0])
    assert (chosen <= position[:, None]).all()
    for row, slot in enumerate(slots):
        named = ids[row][ids[row] >= 0]
        own = SCRAMBLED[slot] if position[row] >= 0 else np.array([], int)
        assert set(named // PAGE) <= set(own)
        assert len(set(named)) == len(named) == min(position[row] + 1, CONFIG.index_topk)


def test_bf16_stays_near_the_recorded_fp32():
    config, weights = first_layers(1, "bfloat16")
    recorded = load_file(GOLDEN / "golden.safetensors")
    tokens, wanted = recorded["input_ids"].astype(np.int32), recorded["hidden_states"][1]
    batch = rectangle(tokens, np.zeros(2, np.int32), np.full(2, tokens.shape[1]))
    cache = model.init_cache(config, 2, tokens.shape[1], jnp.bfloat16)
    hidden, taps, cache = forward(config, weights, cache, batch, taps=(0,))
    assert hidden.dtype == taps.dtype == cache.layers[0].latent.dtype == jnp.bfloat16
    error = np.abs(np.asarray(taps, np.float32).reshape(wanted.shape) - wanted).max(axis=-1)
    # rounding also changes which rows are chosen, which a few tokens show
    assert np.median(error) < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("tap", [-2, 2])
def test_a_tap_outside_the_model_is_refused(tap):
    batch = rectangle(jnp.ones((SLOTS, 1), int), jnp.zeros(SLOTS, int), jnp.ones(SLOTS, int))
    with pytest.raises(ValueError, match=rf"tap {tap} .*wanted -1 .* to 1"):
        model.forward(CONFIG, WEIGHTS, empty("paged"), batch, taps=(tap,))
