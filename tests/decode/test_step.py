"""What one step leaves behind: cache rows, context rows, idle slots, and the work it ran."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.decode.step import Weights, decode_step
from dspark_jax.models import dense
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing import markov, scripted

SLOTS, CAPACITY, BLOCK = 8, 64, 4
"""The same in all tests of the small pair, which then share their compiled programs."""
PROMPT = np.random.default_rng(3).integers(0, 96, (SLOTS, 6)).astype(np.int32)


@pytest.fixture(scope="module")
def pair(make_pair):
    """Short blocks: the walk is unrolled, and long ones only take longer to compile."""
    return make_pair(block_size=BLOCK)


run_steps = jax.jit(loop.run_steps, static_argnames="config")
step = jax.jit(decode_step, static_argnames="config")
prefill = jax.jit(loop.prefill, static_argnames="config")
admit = jax.jit(loop.admit)
new_state = jax.jit(
    init_state, static_argnames=("config", "slots", "capacity", "max_tokens", "dtype")
)


def step_config(pair, mode, **options):
    options = {"sampled": False, "filtered": False, **options}
    return StepConfig(pair.target, pair.drafter, mode, **options)


def priced(slots, depth, per_token=0.06, drafting=0.05, power=1):
    plain = no_costs(slots, depth)
    verify = 1.0 + per_token * jnp.arange(plain.verify.shape[1], dtype=jnp.float32) ** power
    draft = plain.draft + drafting
    return plain.replace(verify=verify[None], draft=draft, known=jnp.asarray(True))


def reading(config):
    """What a prefill needs of a config, so that all modes share one program."""
    return config if config.mode == "off" else StepConfig(config.target, config.drafter, "static")


def empty(config, slots):
    return new_state(config, slots=slots, capacity=CAPACITY, max_tokens=32, dtype=jnp.float32)


def filled(pair, config, count=SLOTS, *, max_new_tokens=32):
    """The first ``count`` prompts in their slots, the rest idle."""
    slots = np.arange(SLOTS, dtype=np.int32)
    rows = np.where(slots < count, slots, SLOTS)
    lengths = np.where(slots < count, PROMPT.shape[1] - 1, 0)
    state = empty(config, SLOTS)
    state = prefill(pair.weights, state, rows, PROMPT[:, :-1], lengths, config=reading(config))
    requests = make_requests(SLOTS, max_new_tokens=max_new_tokens, context=CAPACITY)
    return admit(state, rows, PROMPT[:, -1], requests)


@functools.partial(jax.jit, static_argnums=0)
def next_logits(config, weights, state):
    """Logits of the token after every slot's anchor."""
    rows = rectangle(state.anchor[:, None], state.cache.length, jnp.ones_like(state.anchor))
    hidden, _, _ = dense.forward(config, weights, state.cache, rows)
    return dense.unembed(config, weights, hidden)


def assert_like_a_fresh_prefill(pair, config, state, prompts):
    """Committed cache rows, context rows and next logits of each slot are those of its text."""
    logits = np.asarray(next_logits(pair.target, pair.weights.target, state))
    state = jax.device_get(state)
    width = 48
    for slot, prompt in enumerate(prompts):
        text = np.concatenate([prompt, state.tokens[slot, : state.emitted[slot]]])
        length = len(text) - 1
        assert state.cache.length[slot] == length
        assert state.anchor[slot] == text[-1]
        padded = np.zeros((1, width), np.int32)
        padded[0, :length] = text[:-1]
        zero = np.zeros(1, np.int32)
        fresh = prefill(
            pair.weights,
            empty(config, 1),
            zero,
            padded,
            np.asarray([length], np.int32),
            config=reading(config),
        )
        fresh = jax.device_get(fresh).replace(anchor=text[-1:].astype(np.int32))
        wanted = next_logits(pair.target, pair.weights.target, fresh)
        np.testing.assert_allclose(logits[slot], wanted[0], atol=2e-5)
        pairs = [*zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh.cache), strict=True)]
        pairs += zip(jax.tree.leaves(state.context), jax.tree.leaves(fresh.context), strict=True)
        for found, fresh_rows in pairs:
            if found.ndim == 4:
                np.testing.assert_allclose(
                    found[slot, :, :length], fresh_rows[0, :, :length], atol=2e-5
                )


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_any_accepted_prefix_leaves_what_a_fresh_prefill_leaves(pair, mode):
    """Slot a has a draft that goes wrong at position a; those of later slots are right."""
    plain = step_config(dataclasses.replace(pair, drafter=None), "off")
    state = filled(pair, plain)
    answers = np.asarray(
        run_steps(pair.weights, state, no_costs(SLOTS, 0), 12, config=plain).tokens
    )
    script = np.concatenate([PROMPT, answers], axis=1)
    for slot in range(BLOCK):
        script[slot, PROMPT.shape[1] + slot] += 1
    script %= 97
    wrong = dataclasses.replace(
        pair,
        drafter=scripted.oracle(97, BLOCK),
        weights=Weights(
            pair.weights.target,
            scripted.ScriptedWeights(jnp.asarray(script, jnp.int32), jnp.asarray(2.0)),
        ),
    )
    config = step_config(wrong, mode)
    state = filled(wrong, config)
    state, outcome = step(wrong.weights, state, no_costs(SLOTS, BLOCK), config=config)
    accepted = np.minimum(np.arange(SLOTS), BLOCK)
    np.testing.assert_array_equal(outcome.accepted, accepted)
    np.testing.assert_array_equal(outcome.count, accepted + 1)
    for slot, count in enumerate(accepted + 1):
        np.testing.assert_array_equal(outcome.tokens[slot, :count], answers[slot, :count])
    assert_like_a_fresh_prefill(wrong, config, state, PROMPT)


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_rejected_rows_leave_no_trace_in_the_drafters_context(pair, mode):
    config = step_config(pair, mode)
    state = filled(pair, config, 5)
    state = run_steps(pair.weights, state, priced(SLOTS, BLOCK), 8, config=config)
    assert state.accepted.sum() > 0
    assert_like_a_fresh_prefill(pair, config, state, PROMPT[:5])
    for rows in jax.tree.leaves(state.context):
        written = np.abs(np.asarray(rows)).max(axis=(1, 3)) > 0
        past = np.arange(rows.shape[2]) >= np.asarray(state.cache.length)[:, None]
        assert not (written & past).any()
        assert written[~past].all()


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_what_idle_slots_hold_changes_nothing(pair, mode):
    """Five of eight slots are idle and hold garbage, out-of-range tokens and lengths included."""
    config = step_config(pair, mode)
    clean = filled(pair, config, 3)
    idle = np.arange(SLOTS) >= 3
    random = np.random.default_rng(5)

    def dirty(leaf):
        axes = [axis for axis, size in enumerate(leaf.shape) if size == SLOTS][:1]
        if not axes or leaf.dtype == bool:
            return leaf
        shape = [SLOTS if axis == axes[0] else 1 for axis in range(leaf.ndim)]
        noise = random.integers(0, 40, leaf.shape).astype(leaf.dtype)
        return np.where(idle.reshape(shape), noise, leaf)

    garbage = jax.tree.map(dirty, jax.device_get(clean))
    assert (garbage.anchor != clean.anchor).any()
    garbage = garbage.replace(requests=clean.requests)
    tables = priced(SLOTS, BLOCK)
    wanted, found = (
        run_steps(pair.weights, state, tables, 6, config=config) for state in (clean, garbage)
    )
    for name in ("tokens", "windows", "accepted", "commits", "emitted", "anchor", "steps"):
        np.testing.assert_array_equal(getattr(found, name)[:3], getattr(wanted, name)[:3])
    assert wanted.emitted[:3].min() >= 6
    for name in ("emitted", "steps", "anchor"):
        np.testing.assert_array_equal(getattr(found, name)[3:], getattr(garbage, name)[3:])


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_a_prompt_is_read_in_pieces_while_others_decode(pair, mode):
    """The slot that is still reading drafts nothing, emits nothing, and disturbs nobody."""
    config = step_config(pair, mode)
    prompts = PROMPT[:3]
    tables = priced(SLOTS, BLOCK)
    run = functools.partial(run_steps, config=config)
    plain = step_config(dataclasses.replace(pair, drafter=None), "off")
    state = filled(pair, plain, 3)
    wanted = run_steps(pair.weights, state, no_costs(SLOTS, 0), 32, config=plain).tokens
    state = filled(pair, config, 2)
    late = np.asarray([2], np.int32)
    for begin in (0, 2, 4):
        piece = prompts[2:, begin : begin + 2]
        count = np.asarray([min(2, 5 - begin)], np.int32)
        state = prefill(pair.weights, state, late, piece, count, config=reading(config))
        state = run(pair.weights, state, tables, 2)
        assert (state.emitted[2], state.steps[2]) == (0, 0)
        assert not state.windows[2].any()
    requests = make_requests(1, max_new_tokens=20, context=CAPACITY)
    state = admit(state, late, prompts[2:, -1], requests)
    state = jax.device_get(run(pair.weights, state, tables, 40))
    assert not state.active.any()
    for slot, count in enumerate((32, 32, 20)):
        assert state.emitted[slot] == count
        np.testing.assert_array_equal(state.tokens[slot, :count], wanted[slot, :count])


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
@pytest.mark.parametrize(
    "price", [{"drafting": 50.0}, {"per_token": 50.0, "power": 2, "drafting": 0.0}]
)
def test_drafts_that_never_pay_leave_plain_decoding(pair, mode, price):
    config = step_config(pair, mode)
    state = filled(pair, config, 2, max_new_tokens=9)
    state = run_steps(pair.weights, state, priced(SLOTS, BLOCK, **price), 99, config=config)
    state = jax.device_get(state)
    assert state.steps[:2].tolist() == state.emitted[:2].tolist() == [9, 9]
    assert not state.windows.any()
    assert (state.commits[:2, :9] == 1).all()
    if mode == "compact":
        assert not state.accepted.any()


def test_a_depth_beyond_the_trained_block_is_refused_and_the_block_is_the_default(pair):
    for depth in (0, BLOCK + 1):
        with pytest.raises(ValueError, match=rf"k is {depth}; wanted 1\.\.{BLOCK}"):
            step_config(pair, "static", k=depth)
    assert step_config(pair, "static").depth == pair.drafter.block_size


EXECUTED = []


@dataclasses.dataclass(frozen=True)
class WatchedTarget(markov.MarkovTargetConfig):
    """Notes the rows of every forward that really runs."""

    @property
    def family(self):
        def forward(config, weights, cache, packed, *, taps):
            rows = packed.tokens.shape[0]
            jax.debug.callback(lambda: EXECUTED.append(("verify", rows)))
            return markov.forward(config, weights, cache, packed, taps=taps)

        return types.SimpleNamespace(**{**vars(markov), "forward": forward})


@dataclasses.dataclass(frozen=True)
class WatchedDrafter(markov.MarkovDrafterConfig):
    """Notes the depth of every walk that really runs."""

    @property
    def family(self):
        def base_logits(config, weights, head, hidden):
            depth = hidden.shape[1]
            jax.debug.callback(lambda: EXECUTED.append(("draft", depth)))
            return markov.base_logits(config, weights, head, hidden)

        return types.SimpleNamespace(**{**vars(markov), "base_logits": base_logits})


@dataclasses.dataclass(frozen=True)
class SilentTarget(markov.MarkovTargetConfig):
    """Names best tokens and gives no logits."""

    @property
    def family(self):
        def unembed(config, weights, hidden):
            raise AssertionError("logits were asked for")

        def best_tokens(config, weights, hidden):
            return markov.best_tokens(markov.MarkovTargetConfig(config.vocab_size), weights, hidden)

        own = {"unembed": unembed, "best_tokens": best_tokens}
        return types.SimpleNamespace(**{**vars(markov), **own})


@pytest.mark.parametrize("change", [{}, {"mode": "cap-accept", "bound_blocks": True}])
def test_steps_of_greedy_requests_ask_for_no_logits(change):
    weights, state, tables, config = watched(2.0, **change)
    config = dataclasses.replace(config, target=SilentTarget(8))
    _, outcome = step(weights, state, tables, config=config)
    assert (outcome.count > 1).all()
    for reading in ({"sampled": True}, {"logprobs": 1}):
        asking = dataclasses.replace(config, **reading)
        with pytest.raises(AssertionError, match="logits were asked for"):
            jax.eval_shape(functools.partial(decode_step, config=asking), weights, state, tables)


def watched(confidence, mode="compact", buckets=(4, 8, 20), **changes):
    """Four requests whose drafts are all right, at one confidence everywhere."""
    config = StepConfig(
        WatchedTarget(8),
        WatchedDrafter(8, 4),
        mode,
        buckets=buckets if mode == "compact" else (),
        sampled=False,
        filtered=False,
        **{"smoothing": 1.0, "walk_caps": (1, 2, 4), **changes},
    )
    table = 20.0 * jnp.roll(jnp.eye(8), 1, axis=1)
    weights = Weights(
        markov.MarkovTargetWeights(table),
        markov.MarkovDrafterWeights(table, jnp.full((4, 8), confidence)),
    )
    state = new_state(config, slots=4, capacity=64, max_tokens=64, dtype=jnp.float32)
    requests = make_requests(4, max_new_tokens=64, context=64)
    state = admit(state, np.arange(4), np.arange(4), requests)
    tables = priced(4, 4, per_token=0.1, drafting=0.05)
    return weights, state, tables, config


def executed(confidence, steps=6, **changes):
    """Sizes run at each of some steps of ``watched``, and the state after them."""
    weights, state, tables, config = watched(confidence, **changes)
    EXECUTED.clear()
    state = run_steps(weights, state, tables, steps, config=config)
    jax.effects_barrier()
    sizes = {
        kind: [size for name, size in EXECUTED if name == kind] for kind in ("verify", "draft")
    }
    return sizes, state


def test_fewer_rows_are_verified_and_fewer_drafts_walked_when_confidence_falls():
    """The programs that ran, not the ones asked for."""
    sure, _ = executed(6.0)
    unsure, _ = executed(-0.5)
    hopeless, state = executed(-6.0)
    assert sure["verify"] == [20] * 6
    assert sure["draft"] == [4] * 6
    assert sum(unsure["verify"][1:]) < sum(sure["verify"][1:])
    assert sum(unsure["draft"][1:]) < sum(sure["draft"][1:])
    assert hopeless["verify"][1:] == [4] * 5
    assert hopeless["draft"][1:] == []
    assert (state.commits[:, 1:6] == 1).all()


def shaped(depth, rows, **changes):
    """Programs and windows of steps of one shape: all four requests draft right."""
    return executed(-0.5, buckets=(), walk_caps=(), shape=Shape(depth, rows), **changes)


@pytest.mark.parametrize(
    ("depth", "rows"), [(4, 20), (4, 10), (2, 10), (2, 12), (1, 8), (0, 4)], ids=str
)
def test_a_shape_is_what_is_walked_and_verified_whatever_pays(depth, rows):
    sizes, state = shaped(depth, rows)
    assert sizes["verify"] == [rows] * 6
    assert sizes["draft"] == [depth] * 6 * (depth > 0)
    windows = np.asarray(state.windows[:, :6])
    assert (windows.sum(axis=0) == min(rows - 4, 4 * depth)).all(), "no row is left empty"
    assert (np.asarray(state.commits[:, :6]) == windows + 1).all()


def test_the_rows_of_a_shape_go_to_the_drafts_that_survive():
    weights, state, tables, config = watched(
        0.0, buckets=(), walk_caps=(), shape=Shape(depth=4, rows=10)
    )
    sure = weights.drafter.confidence.at[:, 1].set(9.0)
    weights = weights.replace(drafter=weights.drafter.replace(confidence=sure))
    _, outcome = step(weights, state, tables, config=config)
    # anchors are 0..3; the drafts behind token 1 are the sure ones, and then all are alike
    assert outcome.window.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "change", [{"policy": "causal"}, {"threshold": 0.5}, {"mode": "static"}, {"mode": "off"}]
)
def test_a_shape_is_refused_where_windows_look_at_the_drafts(change):
    with pytest.raises(ValueError, match="shape is Shape"):
        shaped(2, 8, **change)


def test_what_a_shape_does_not_walk_is_no_draft_that_a_full_block_could_accept():
    """Blocks are filled up with token 0, which is right behind token 7."""
    _, state = shaped(1, 8, mode="cap-accept")
    assert (np.asarray(state.accepted[:, :6]) == 1).all()


def test_steps_of_all_shapes_report_alike_with_logprobs_too(pair):
    """Who reads several legs of a dispatch joins what they say."""

    def reported(shape):
        config = step_config(pair, "compact", shape=shape, logprobs=2)
        state, tables = jax.eval_shape(lambda: empty(config, 4)), no_costs(4, BLOCK)
        taken = functools.partial(decode_step, config=config)
        return jax.eval_shape(taken, pair.weights, state, tables)[1]

    wide = reported(Shape(BLOCK, 20))
    assert wide.logprobs.chosen.shape == wide.tokens.shape == (4, BLOCK + 1)
    assert reported(Shape(2, 9)) == reported(Shape(0, 4)) == wide


def test_a_shape_without_a_row_for_every_anchor_is_refused():
    with pytest.raises(ValueError, match="the shape has 3 rows; wanted 4 or more"):
        shaped(2, 3)


def test_a_shape_without_a_drafter_is_refused_as_its_mode_is():
    with pytest.raises(ValueError, match="mode is 'compact' without a drafter"):
        StepConfig(WatchedTarget(8), None, "compact", shape=Shape(1, 8))


def test_a_shape_deeper_than_the_block_is_refused():
    with pytest.raises(ValueError, match=r"depth of the shape is 5; wanted 0\.\.4"):
        shaped(5, 24)


def test_a_threshold_of_1_verifies_no_draft():
    _, state = executed(6.0, threshold=1.0)
    assert not state.windows.any()
    assert (state.commits[:, :6] == 1).all()


def test_a_window_ends_at_the_first_draft_below_the_threshold_whatever_follows():
    """Confidences are conditional: the two behind a doubtful draft do not make up for it."""
    weights, state, tables, config = watched(3.0, threshold=0.5, buckets=(20,), walk_caps=(4,))
    doubtful = weights.drafter.confidence.at[1].set(-3.0)
    weights = weights.replace(drafter=weights.drafter.replace(confidence=doubtful))
    _, outcome = step(weights, state, tables, config=config)
    assert outcome.window.tolist() == [1, 1, 1, 1]


def test_a_policy_beside_a_threshold_is_refused():
    with pytest.raises(ValueError, match=r"policy is 'causal' with threshold 0\.5.*no threshold"):
        executed(0.0, threshold=0.5, policy="causal")


@pytest.mark.parametrize("threshold", [-0.1, 1.1])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold is {threshold}; wanted a probability"):
        executed(0.0, threshold=threshold)


def test_a_verified_row_is_never_thrown_away_in_compact_mode():
    """What was verified and accepted is committed, with the bonus token."""
    for confidence in (6.0, 0.5, -0.5):
        _, state = executed(confidence)
        np.testing.assert_array_equal(state.commits[:, :6], state.accepted[:, :6] + 1)


def test_a_draining_batch_ends_and_accepts_like_the_full_block():
    """Thirty-two requests of different length: per-position acceptance, given verification."""
    slots, block = 32, 4
    keys = jax.random.split(jax.random.key(0), 2)
    target = 1.5 * jax.random.normal(keys[0], (8, 8))
    drafter = target + 0.7 * jax.random.normal(keys[1], (8, 8))
    weights = Weights(
        markov.MarkovTargetWeights(target),
        # positions differ in confidence, tokens do not: the window tells nothing of the draft
        markov.MarkovDrafterWeights(
            drafter, jnp.broadcast_to(jnp.linspace(2.5, 0.8, block)[:, None], (block, 8))
        ),
    )
    limits = 4 * jnp.arange(slots) + 1
    pair_configs = markov.MarkovTargetConfig(8), markov.MarkovDrafterConfig(8, block)
    rates = {}
    for mode in ("static", "compact"):
        config = StepConfig(*pair_configs, mode, filtered=False)
        found = loop.generate(
            weights,
            jnp.zeros((slots, 1), jnp.int32),
            jnp.ones(slots, jnp.int32),
            make_requests(slots, temperature=1.0, seed=7, max_new_tokens=limits, context=200),
            priced(slots, block, per_token=0.02, drafting=0.1),
            config=config,
            max_tokens=125,
        )
        np.testing.assert_array_equal(found.count, limits)
        assert found.steps.max() <= 125
        taken = np.arange(125) < np.asarray(found.steps)[:, None]
        position = np.arange(1, block + 1)
        windows, accepted = (np.asarray(x)[taken][:, None] for x in (found.windows, found.accepted))
        judged = (windows >= position) & (accepted >= position - 1)
        rates[mode] = judged.sum(axis=0), (judged & (accepted >= position)).sum(axis=0)
        if mode == "compact":
            assert 0 < windows.mean() < block - 0.5
    (n, a), (m, b) = rates["static"], rates["compact"]
    assert min(n.min(), m.min()) > 50
    share = (a + b) / (n + m)
    sigma = np.sqrt(share * (1 - share) * (1 / n + 1 / m))
    assert (np.abs(a / n - b / m) < 3 * sigma).all()


def test_a_batch_at_the_edge_of_what_pays_does_not_change_its_mind():
    weights, state, tables, config = watched(0.0, hysteresis=0.1)
    # a draft in every block is worth 4 * 1.5 / (draft + 1.8); none is worth 4 / 1.4
    even = 6.0 * 1.4 / 4.0 - 1.8
    settled = state.replace(confidences=jnp.full_like(state.confidences, 0.5))

    def drafts(drafting, gain):
        price = tables.replace(
            draft=jnp.full_like(tables.draft, even / gain + 1.8 / gain - 1.8),
            walk=jnp.asarray([1.0, 9.0, 9.0, 9.0]),
        )
        now = settled.replace(drafting=jnp.asarray(drafting))
        return int(step(weights, now, price, config=config)[1].decision.depth) > 0

    assert [drafts(was, 0.95) for was in (False, True)] == [False, True]
    assert [drafts(was, 1.05) for was in (False, True)] == [False, True]
    assert [drafts(was, 0.85) for was in (False, True)] == [False, False]
    assert [drafts(was, 1.15) for was in (False, True)] == [True, True]
