"""At temperature 0 every mode, policy, depth and batch gives the tokens of plain decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.models import dense
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import no_costs

COUNT, LONGEST, ANSWER, BATCH = 15, 12, 32, 5
# a walk is unrolled: longer blocks only take longer to compile
BLOCK = 4
RANDOM = np.random.default_rng(1)
PROMPTS = RANDOM.integers(0, 96, (COUNT, LONGEST)).astype(np.int32)
LENGTHS = np.concatenate([[1, 2, 3], RANDOM.integers(1, LONGEST + 1, COUNT - 3)]).astype(np.int32)


def costs(slots, depth):
    """Verifying has a price, so that doubtful drafts are trimmed."""
    plain = no_costs(slots, depth)
    verify = 1.0 + 0.06 * jnp.arange(plain.verify.shape[1], dtype=jnp.float32)
    return plain.replace(verify=verify[None], draft=plain.draft + 0.05, known=jnp.asarray(True))


new_state = jax.jit(
    init_state, static_argnames=("config", "slots", "capacity", "max_tokens", "dtype")
)
prefill = jax.jit(loop.prefill, static_argnames="config")
admit = jax.jit(loop.admit)
run_steps = jax.jit(loop.run_steps, static_argnames="config")


def answers(pair, config, prompts, lengths):
    """As ``loop.generate``, but the program that reads prompts is the same for all modes."""
    every = np.arange(len(prompts), dtype=np.int32)
    state = new_state(
        config,
        slots=len(prompts),
        capacity=LONGEST + ANSWER,
        max_tokens=ANSWER,
        dtype=jnp.float32,
    )
    reading = config if config.mode == "off" else StepConfig(pair.target, pair.drafter, "static")
    state = prefill(pair.weights, state, every, prompts[:, :-1], lengths - 1, config=reading)
    requests = make_requests(len(prompts), max_new_tokens=ANSWER, context=LONGEST + ANSWER)
    state = admit(state, every, prompts[every, lengths - 1], requests)
    prices = costs(len(prompts), config.depth)
    state = run_steps(pair.weights, state, prices, ANSWER, config=config)
    fields = ("tokens", "finish", "steps", "windows", "accepted", "commits")
    return loop.Generated(
        **{name: getattr(state, name) for name in fields},
        count=state.emitted,
        logprobs=None,
        confidence_log=None,
    )


def decode(pair, mode, batch=BATCH, count=COUNT, buckets=None, caps=None, **options):
    """The first ``count`` answers, ``batch`` at a time."""
    config = StepConfig(
        pair.target,
        None if mode == "off" else pair.drafter,
        mode,
        sampled=False,
        filtered=False,
        **options,
    )
    if buckets is None and mode == "compact":
        buckets = tuple(sorted({min(part * batch, batch * config.width) for part in (1, 2, 5)}))
    if caps is None and config.adaptive:
        caps = (1, config.depth) if config.depth > 1 else ()
    config = dataclasses.replace(config, buckets=buckets or (), walk_caps=caps or ())
    parts = [
        answers(pair, config, PROMPTS[begin : begin + batch], LENGTHS[begin : begin + batch])
        for begin in range(0, count, batch)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


plain = functools.cache(functools.partial(decode, mode="off"))


def same_text(found, pair):
    wanted = plain(pair)
    np.testing.assert_array_equal(found.tokens, wanted.tokens[: len(found.tokens)])
    np.testing.assert_array_equal(found.commits.sum(axis=1), found.count)
    assert (found.count == ANSWER).all()


def trimmed(found, depth):
    """Share of steps whose window was cut short by the budget, not by the end of the answer."""
    before = np.cumsum(found.commits, axis=1) - found.commits
    valid = np.minimum(ANSWER - before - 1, depth)
    taken = np.arange(ANSWER) < found.steps[:, None]
    return (found.windows < valid)[taken].mean()


@pytest.fixture(scope="module")
def pair(make_pair):
    """A Llama of one layer, which keeps compilation short."""
    return make_pair(block_size=BLOCK, num_hidden_layers=1, num_target_layers=1)


@pytest.fixture(scope="module")
def deeper(make_pair):
    """A Qwen3 of two layers."""
    return make_pair(block_size=BLOCK, model_type="qwen3", qk_norm=True)


@pytest.mark.parametrize("name", ["pair", "deeper"])
def test_plain_decoding_takes_the_best_token_of_one_forward_over_the_whole_text(request, name):
    either = request.getfixturevalue(name)
    found = plain(either).tokens
    for prompt, length, answer in zip(PROMPTS, LENGTHS, found, strict=True):
        text = np.concatenate([prompt[:length], answer])
        padded = np.zeros((1, LONGEST + ANSWER), np.int32)
        padded[0, : len(text)] = text
        best = best_tokens(either, jnp.asarray(padded))
        np.testing.assert_array_equal(best[length - 1 : len(text) - 1], answer)


def best_tokens(pair, text):
    """The most likely next token after every position of one text."""
    return np.asarray(_best_tokens(pair.target, pair.weights.target, text))


@functools.partial(jax.jit, static_argnums=0)
def _best_tokens(config, weights, text):
    cache = dense.init_cache(config, 1, text.shape[1], jnp.float32)
    rows = rectangle(text, jnp.zeros(1, jnp.int32), jnp.asarray([text.shape[1]]))
    hidden, _, _ = dense.forward(config, weights, cache, rows)
    return jnp.argmax(dense.unembed(config, weights, hidden), axis=-1)


def test_plain_decoding_is_the_same_alone_and_in_a_batch(pair):
    same_text(decode(pair, "off", batch=1, count=COUNT), pair)


WHOLE = {"buckets": ((BLOCK + 1) * BATCH,), "caps": (BLOCK,)}
"""One bucket and one walk: a third of the time to compile."""
ADAPTIVE = [
    ("compact", {}),
    ("compact", {"lag": 3, **WHOLE}),
    ("compact", {"policy": "causal", **WHOLE}),
    ("compact", {"policy": "fresh", **WHOLE}),
    ("cap-accept", {}),
]


@pytest.mark.parametrize(("mode", "options"), ADAPTIVE)
def test_adaptive_modes_trim_windows_and_give_the_plain_tokens(pair, mode, options):
    found = decode(pair, mode, **options)
    same_text(found, pair)
    assert trimmed(found, BLOCK) > 0.3
    assert found.windows.max() > 1
    assert found.accepted.sum() > 0


def test_another_family_with_more_layers_gives_the_plain_tokens(deeper):
    same_text(decode(deeper, "compact", **WHOLE), deeper)


def test_a_request_alone_gives_the_plain_tokens(pair):
    found = decode(pair, "compact", batch=1, count=12, buckets=(BLOCK + 1,), caps=(BLOCK,))
    same_text(found, pair)
    assert trimmed(found, BLOCK) > 0.1


@pytest.mark.parametrize("depth", [1, 3, BLOCK])
def test_any_depth_up_to_the_trained_block_gives_the_plain_tokens(pair, depth):
    found = decode(pair, "static", k=depth)
    same_text(found, pair)
    assert found.windows.max() == found.accepted.max() == depth


def test_a_shallow_compact_step_gives_the_plain_tokens(pair):
    found = decode(pair, "compact", k=3, buckets=(4 * BATCH,), caps=(3,))
    same_text(found, pair)
    assert trimmed(found, 3) > 0.1


def test_a_block_of_one_gives_the_plain_tokens(make_pair):
    single = make_pair(num_hidden_layers=1, num_target_layers=1, block_size=1)
    for mode in ("static", "compact"):
        found = decode(single, mode, buckets=(2 * BATCH,) if mode == "compact" else ())
        same_text(found, single)
        assert found.windows.max() == 1
        assert found.accepted.any()


def test_two_runs_are_the_same_to_the_last_count(pair):
    first, second = decode(pair, "compact"), decode(pair, "compact")
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_one_call_that_reads_prompts_in_chunks_changes_nothing(pair):
    whole = decode(pair, "static", count=BATCH)
    config = StepConfig(pair.target, pair.drafter, "static", sampled=False, filtered=False)
    pieces = loop.generate(
        pair.weights,
        PROMPTS[:BATCH],
        LENGTHS[:BATCH],
        make_requests(BATCH, max_new_tokens=ANSWER, context=LONGEST + ANSWER),
        costs(BATCH, config.depth),
        config=config,
        max_tokens=ANSWER,
        chunk=4,
    )
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)


def test_a_drafter_that_reads_the_prompts_last_row_alone_drafts_differently(pair):
    """Every prompt row is context."""
    start = jnp.asarray([8])
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(8, 64)), jnp.float32)
    drafter, family = pair.drafter, pair.drafter.family
    embed = pair.weights.target.embed

    @jax.jit
    def hidden(kept):
        context = family.init_context(drafter, 1, 64, jnp.float32)
        slot = jnp.where(jnp.arange(8) >= 8 - kept, 0, 1)
        context = family.commit_context(
            drafter, pair.weights.drafter, context, rows, slot, jnp.arange(8)
        )
        return family.block_hidden(
            drafter, pair.weights.drafter, embed, context, jnp.asarray([3]), start
        )

    assert np.abs(hidden(8) - hidden(1)).max() > 1e-2
