"""One step of decoding: budget, draft, pack, verify, accept, commit. The heart of the package."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.calibration.nearest import nearest_temperatures
from dspark_jax.decode import noise
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.draft import Drafts, draft
from dspark_jax.decode.state import CONTEXT, LENGTH, RUNNING, STOP, Logprobs, State
from dspark_jax.models.ragged import Mixed, Packed, compact, rectangle
from dspark_jax.schedule.budget import Load, allocate, best_budget, causal_budget
from dspark_jax.schedule.cost import CostTables
from dspark_jax.schedule.survival import calibrate, remember, running_product
from dspark_jax.verify.accept import Sampling, accepted_prefix, final_token
from dspark_jax.verify.block_accept import Block, Bounds, follow
from pallas_kernels.best_linear import best_token


@flax.struct.dataclass
class Weights:
    """Weights of the pair; ``drafter`` is None in mode "off"."""

    target: Any
    drafter: Any


@flax.struct.dataclass
class Decision:
    """What a step decided before it verified.

    Attributes:
        budget: drafts to verify over the whole batch.
        depth: drafts walked of each request; 0 in a step that did not draft.
        confidence: calibrated, of the walked drafts; None without a head.
    """

    budget: Int[Array, ""]
    depth: Int[Array, ""]
    confidence: Float[Array, "S G"] | None


@flax.struct.dataclass
class Outcome:
    """What one step did, by slot.

    Attributes:
        tokens: ``[S, W]`` committed tokens; the first ``count`` are real.
        count: committed tokens; 0 in idle slots.
        window: drafts verified for commitment.
        accepted: drafts that the verified rows accepted (in mode "cap-accept" also beyond the
            window).
        logprobs: of ``tokens``; None unless the config asks for them.
        decision: how the windows came about; None in mode "off".
        bounds: of blocks whose full acceptance became known; None unless the config asks for it.
    """

    tokens: Int[Array, "S W"]
    count: Int[Array, "S"]
    window: Int[Array, "S"]
    accepted: Int[Array, "S"]
    logprobs: Logprobs | None
    decision: Decision | None = None
    bounds: Bounds | None = None


def decode_step(
    weights: Weights,
    state: State,
    tables: CostTables,
    *,
    config: StepConfig,
    prompts: Packed | None = None,
) -> tuple[State, Outcome]:
    """Advance every active request by at least one token. Pure; jit with ``config`` static.

    Rows of ``prompts`` ride along: they enter the caches of their slots, which must not be
    active, and nothing else; ``cache.length`` of those slots is the caller's to set.

    Nothing that decides budget, bucket, draft depth or skipping depends on this step's draft
    tokens, except under policy "fresh" (docs/exactness.md).
    """
    sampling = Sampling(state.requests.temperature, state.requests.top_k, state.requests.top_p)
    keys = noise.step_keys(state.requests.seed, state.steps) if config.sampled else None
    room = _room(state)
    if config.mode == "off":
        window = jnp.zeros_like(room)
        drafts, decision = None, None
    else:
        valid = jnp.arange(1, config.depth + 1)[None] <= (room - 1)[:, None]
        drafts, window, decision, state = _draft_and_allocate(
            weights, state, tables, keys, valid & state.active[:, None], config
        )
        state = state.replace(confidence_log=_log_confidences(state, drafts))
    full = None if decision is None else jnp.clip(room - 1, 0, decision.depth)
    state, outcome = verify_and_commit(
        weights, state, sampling, keys, drafts, window, room, prompts, config, full
    )
    return state.replace(tick=state.tick + 1), dataclasses.replace(outcome, decision=decision)


def _log_confidences(state: State, drafts: Drafts) -> Float[Array, "S M G"] | None:
    """The log with this step's logits in the row of each active request's step, if one is kept."""
    log = state.confidence_log
    if log is None:
        return None
    at = jnp.where(state.active, state.steps, log.shape[1])
    return log.at[jnp.arange(state.slots), at].set(drafts.confidence, mode="drop")


def _room(state: State) -> Int[Array, "S"]:
    """Tokens each request may still emit: its own limit, or the end of its context."""
    used = state.cache.length + 1
    room = jnp.minimum(state.requests.max_new_tokens - state.emitted, state.requests.context - used)
    return jnp.where(state.active, room, 0)


def _draft_and_allocate(
    weights: Weights,
    state: State,
    tables: CostTables,
    keys: Array | None,
    valid: Bool[Array, "S G"],
    config: StepConfig,
) -> tuple[Drafts, Int[Array, "S"], Decision, State]:
    """Draft as deep as lagged information asks for, then give each request its window.

    The state comes back with what later steps decide by.
    """
    if not config.adaptive or config.threshold is not None:
        drafts = draft(weights, state, keys, config.depth, config=config)
        confidence = None if drafts.confidence is None else _calibrated(drafts, state, tables)
        wanted = valid
        if config.threshold is not None:
            assert confidence is not None, "the config has been checked for a head"
            wanted = jnp.cumprod(valid & (confidence > config.threshold), axis=1)
        window = wanted.sum(axis=1).astype(jnp.int32)
        decision = Decision(window.sum(), jnp.int32(config.depth), confidence)
        return drafts, window, decision, state

    if config.shape is not None:
        return *_draft_in_shape(weights, state, tables, keys, valid, config.shape, config), state

    load = Load(
        sampling=state.active.sum(),
        base_tokens=state.active.sum(),
        draft_requests=jnp.asarray(state.slots),
        cache_rows=jnp.where(state.active, state.cache.length, 0).sum(),
    )
    lagged = running_product(state.confidences[state.tick % config.lag])
    depths = config.walk_caps or (config.depth,)
    plan = best_budget(
        lagged, valid, load, tables, depths if config.policy == "lagged" else (config.depth,)
    )
    # A batch at the point where drafting just pays does not change its mind at every step.
    edge = jnp.where(state.drafting, 1.0 - config.hysteresis, 1.0 + config.hysteresis)
    drafting = plan.gain > edge
    budget, depth = plan.budget, plan.depth
    budget, depth = jnp.where(drafting, budget, 0), jnp.where(drafting, depth, 0)

    caps = (0, *depths)
    tier = jnp.searchsorted(jnp.asarray(caps), depth, method="compare_all")
    branches = [functools.partial(draft, cap=cap, config=config) for cap in caps]
    drafts = jax.lax.switch(tier, branches, weights, state, keys)
    depth = jnp.asarray(caps, jnp.int32)[tier]
    drafted = jnp.arange(1, config.depth + 1)[None] <= depth

    confidence = _calibrated(drafts, state, tables)
    current = running_product(confidence)
    usable = valid & drafted
    if config.policy == "causal":
        budget = causal_budget(current, usable, load, tables).budget
    elif config.policy == "fresh":
        budget = best_budget(current, usable, load, tables).budget
    window = allocate(current, usable, budget)
    newest = state.confidences[(state.tick - 1) % config.lag]
    kept = remember(confidence, newest, drafted & state.active[:, None], config.smoothing)
    state = state.replace(
        confidences=state.confidences.at[state.tick % config.lag].set(kept),
        drafting=jnp.where(valid.any(), drafting, state.drafting),
    )
    return drafts, window, Decision(budget, depth, confidence), state


def _draft_in_shape(
    weights: Weights,
    state: State,
    tables: CostTables,
    keys: Array | None,
    valid: Bool[Array, "S G"],
    shape: Shape,
    config: StepConfig,
) -> tuple[Drafts, Int[Array, "S"], Decision]:
    """Draft to the depth of the shape, and fill its rows with the drafts of highest survival.

    Raises:
        ValueError: rows that do not hold every anchor.
    """
    if shape.rows < state.slots:
        raise ValueError(
            f"the shape has {shape.rows} rows; wanted {state.slots} or more, an anchor of each slot"
        )
    drafts = draft(weights, state, keys, shape.depth, config=config)
    confidence = _calibrated(drafts, state, tables)
    drafted = jnp.arange(1, config.depth + 1)[None] <= shape.depth
    usable = valid & drafted
    if shape.rows >= state.slots * (shape.depth + 1):
        window = usable.sum(axis=1).astype(jnp.int32)  # there is room for all
    else:
        budget = shape.rows - state.active.sum()
        window = allocate(running_product(confidence), usable, budget)
    return drafts, window, Decision(window.sum(), jnp.int32(shape.depth), confidence)


def _calibrated(drafts: Drafts, state: State, tables: CostTables) -> Float[Array, "S G"]:
    """Confidences of the drafts, by the temperatures nearest to each request's own."""
    temperatures = nearest_temperatures(
        tables.temperatures, tables.temperature_keys, state.requests.temperature
    )
    assert drafts.confidence is not None, "the config has been checked for a head"
    return calibrate(drafts.confidence, temperatures)


def verify_and_commit(
    weights: Weights,
    state: State,
    sampling: Sampling,
    keys: Array | None,
    drafts: Drafts | None,
    window: Int[Array, "S"],
    room: Int[Array, "S"],
    prompts: Packed | None,
    config: StepConfig,
    full: Int[Array, "S"] | None = None,
) -> tuple[State, Outcome]:
    """Run the target over the windows in the smallest bucket that holds them, and commit.

    ``full`` counts the drafts of a full block, as deep as it was walked: what mode "cap-accept"
    verifies and `verify.block_accept` bounds; None where nothing was drafted.
    """

    def run(packed: Packed, verified: Int[Array, "S"]) -> tuple[State, Outcome]:
        return _commit(
            weights,
            state,
            sampling,
            keys,
            drafts,
            packed,
            verified,
            window,
            room,
            prompts,
            config,
            full,
        )

    walked = config.depth if config.shape is None else config.shape.depth
    rows = state.anchor[:, None]
    if drafts is not None:
        rows = jnp.concatenate([rows, drafts.tokens[:, :walked]], axis=1)
    start = state.cache.length
    if config.mode != "compact":
        # cap-accept verifies all that was walked and commits only up to the window
        verified = window if config.mode != "cap-accept" or full is None else full
        count = jnp.where(state.active, verified + 1, 0)
        return run(rectangle(rows, start, count), verified)

    count = jnp.where(state.active, window + 1, 0)
    buckets = config.buckets or (state.slots * config.width,)
    if config.shape is not None:
        if config.shape.rows == state.slots * (walked + 1):
            return run(rectangle(rows, start, count), window)
        buckets = (config.shape.rows,)
    tier = jnp.searchsorted(jnp.asarray(buckets), count.sum(), method="compare_all")

    def bucket(size: int):
        # rows beyond full windows could belong to nobody
        size = min(size, state.slots * (walked + 1))
        return lambda: run(compact(rows, start, count, size), window)

    return jax.lax.switch(tier, [bucket(size) for size in buckets])


def _commit(
    weights: Weights,
    state: State,
    sampling: Sampling,
    keys: Array | None,
    drafts: Drafts | None,
    packed: Packed,
    verified: Int[Array, "S"],
    window: Int[Array, "S"],
    room: Int[Array, "S"],
    prompts: Packed | None,
    config: StepConfig,
    full: Int[Array, "S"] | None,
) -> tuple[State, Outcome]:
    """Verify one packed batch, decide what is accepted, write what is committed."""
    target = config.target.family
    # Prompts first: they come in even numbers of rows, so that what follows stays aligned.
    rows = packed if prompts is None else Mixed((prompts, packed))
    hidden, taps, cache = target.forward(
        config.target, weights.target, state.cache, rows, taps=config.taps
    )
    if prompts is not None:
        hidden = hidden[prompts.tokens.shape[0] :]
    logits, best = _head(weights, hidden, config)
    walked = packed.row.shape[1] - 1
    if drafts is None or not walked:
        accepted = committed = window
        tokens = _last_token(
            weights, logits, best, packed, keys, None, committed, window, sampling, config
        )[:, None]
    else:
        uniforms = None
        if keys is not None:
            uniforms = noise.uniform(keys, noise.ACCEPT, jnp.arange(1, walked + 1))
        walk = jax.tree.map(lambda every: every[:, :walked], drafts)
        accepted = accepted_prefix(
            logits,
            best,
            packed,
            walk.tokens,
            walk.logprob,
            uniforms,
            sampling,
            verified,
            filtered=config.filtered,
        )
        committed = jnp.minimum(accepted, window)
        last = _last_token(
            weights, logits, best, packed, keys, walk.scores, committed, window, sampling, config
        )
        column = jnp.arange(walked + 1)[None]
        extended = jnp.pad(walk.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(column == committed[:, None], last[:, None], extended)
    # all shapes report alike: who reads outcomes needs to know none
    tokens = jnp.pad(tokens, ((0, 0), (0, config.width - tokens.shape[1])))

    count, finish = _finish(state, tokens, committed, room)
    length = cache.length + count
    context = state.context
    if drafts is not None:
        kept = packed.within() < jnp.take(count, packed.request, mode="fill", fill_value=0)
        slot = jnp.where(kept, packed.slot_of_row(state.slots), state.slots)
        if prompts is not None:
            slot = jnp.concatenate([prompts.slot_of_row(state.slots), slot])
        context = config.drafter.family.commit_context(
            config.drafter, weights.drafter, state.context, taps, slot, rows.position
        )
    slots = jnp.arange(state.slots)
    at = jnp.where(count > 0, state.steps, state.tokens.shape[1])
    anchor = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    logprobs = _logprobs(logits, packed, tokens, config)
    blocks, bounds = state.blocks, None
    if blocks is not None and drafts is not None and full is not None:
        block = Block(
            active=state.active,
            step=state.steps,
            anchor=state.cache.length,
            tokens=tokens,
            count=count,
            drafts=drafts.tokens,
            logprob=drafts.logprob,
            window=window,
            committed=committed,
            full=full,
            stopped=finish == STOP,
            ended=finish != RUNNING,
        )
        blocks, bounds = follow(
            blocks, block, logits, best, packed, sampling, filtered=config.filtered
        )
    outcome = Outcome(tokens, count, window, accepted, logprobs, bounds=bounds)
    state = state.replace(
        blocks=blocks,
        cache=target.commit(config.target, cache, length),
        context=context,
        anchor=jnp.where(count > 0, anchor, state.anchor),
        active=state.active & (finish == RUNNING),
        finish=finish,
        steps=state.steps + (count > 0),
        emitted=state.emitted + count,
        tokens=_append(state.tokens, state.emitted, count, tokens),
        windows=state.windows.at[slots, at].set(window, mode="drop"),
        accepted=state.accepted.at[slots, at].set(accepted, mode="drop"),
        commits=state.commits.at[slots, at].set(count, mode="drop"),
        logprobs=_record_logprobs(state, logprobs, count),
    )
    return state, outcome


def _head(
    weights: Weights, hidden: Float[Array, "T D"], config: StepConfig
) -> tuple[Float[Array, "T V"] | None, Int[Array, "T"]]:
    """The target's logits, if anything reads them, and the most likely token of each row."""
    target = config.target.family
    if not config.reads_logits:
        return None, target.best_tokens(config.target, weights.target, hidden)
    logits = target.unembed(config.target, weights.target, hidden)
    return logits, best_token(logits)


def _last_token(
    weights: Weights,
    logits: Float[Array, "T V"] | None,
    best: Int[Array, "T"],
    packed: Packed,
    keys: Array | None,
    draft_scores: Float[Array, "S G Vd"] | None,
    committed: Int[Array, "S"],
    window: Int[Array, "S"],
    sampling: Sampling,
    config: StepConfig,
) -> Int[Array, "S"]:
    """The token after the committed drafts: residual after a rejection, else the bonus."""
    row = jnp.take_along_axis(packed.row, committed[:, None], axis=1)[:, 0]
    best = jnp.take(best, row, mode="clip")
    if keys is None:
        return best
    assert logits is not None
    own = jnp.take(logits, row, axis=0, mode="clip")
    rejected = committed < window
    role = jnp.where(rejected, noise.RESIDUAL, noise.BONUS)
    gumbel = noise.gumbel(keys, role, committed, own.shape[-1])
    scores, mapping = None, None
    if draft_scores is not None:
        column = jnp.minimum(committed, draft_scores.shape[1] - 1)
        scores = jnp.take_along_axis(draft_scores, column[:, None, None], axis=1)[:, 0]
        mapping = weights.drafter.draft_to_target
    return final_token(
        own, best, scores, mapping, rejected, gumbel, sampling, filtered=config.filtered
    )


def _finish(
    state: State, tokens: Int[Array, "S W"], committed: Int[Array, "S"], room: Int[Array, "S"]
) -> tuple[Int[Array, "S"], Int[Array, "S"]]:
    """Tokens to commit, cut after the first stop id, and why a request ends if it does."""
    column = jnp.arange(tokens.shape[1])[None]
    inside = column <= committed[:, None]
    stops = (tokens[:, :, None] == state.requests.stop_ids[:, None, :]).any(axis=-1) & inside
    stopped = stops.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, committed + 1)
    count = jnp.where(state.active, count, 0)
    exhausted = count >= room
    by_length = state.emitted + count >= state.requests.max_new_tokens
    finish = jnp.where(exhausted, jnp.where(by_length, LENGTH, CONTEXT), RUNNING)
    finish = jnp.where(stopped, STOP, finish)
    return count, jnp.where(state.active, finish, state.finish)


def _append(
    buffer: Array, emitted: Int[Array, "S"], count: Int[Array, "S"], values: Array
) -> Array:
    """Write the first ``count`` of each request's ``values`` ``[S, W, ...]`` behind ``emitted``."""
    column = jnp.arange(values.shape[1])[None]
    at = jnp.where(column < count[:, None], emitted[:, None] + column, buffer.shape[1])
    return buffer.at[jnp.arange(buffer.shape[0])[:, None], at].set(values, mode="drop")


def _logprobs(
    logits: Float[Array, "T V"] | None,
    packed: Packed,
    tokens: Int[Array, "S W"],
    config: StepConfig,
) -> Logprobs | None:
    """Log-softmax of the raw target logits, by request: row w of a window emits its token w."""
    if config.logprobs is None:
        return None
    assert logits is not None

    def by_request(rows: Array) -> Array:
        # as wide as the tokens, whatever the shape
        own = packed.unpack(rows)
        missing = tokens.shape[1] - own.shape[1]
        return jnp.pad(own, ((0, 0), (0, missing), *((0, 0),) * (own.ndim - 2)))

    normalizer = jax.nn.logsumexp(logits, axis=-1)
    emitted = jnp.take(tokens, packed.request, axis=0, mode="clip")
    emitted = jnp.take_along_axis(emitted, packed.within()[:, None], axis=1)
    chosen = jnp.take_along_axis(logits, emitted, axis=-1)[:, 0] - normalizer
    values, ids = jax.lax.top_k(logits, config.logprobs)
    values = values - normalizer[:, None]
    return Logprobs(*map(by_request, (chosen, ids, values)))


def _record_logprobs(
    state: State, logprobs: Logprobs | None, count: Int[Array, "S"]
) -> Logprobs | None:
    """Append this step's logprobs to the record, if one is kept."""
    if state.logprobs is None or logprobs is None:
        return None
    return jax.tree.map(
        lambda buffer, values: _append(buffer, state.emitted, count, values),
        state.logprobs,
        logprobs,
    )
