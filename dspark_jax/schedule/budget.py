"""How many drafted tokens a step verifies, and for which requests."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.schedule.cost import CostTables
from pallas_kernels.top_b import top_b
from pallas_kernels.top_b.reference import counts


@flax.struct.dataclass
class Load:
    """What a step carries besides drafts; scalars.

    Attributes:
        sampling: requests that really sample in this step (one still prefilling does not).
        base_tokens: tokens verified with no draft at all (one anchor a sampling request).
        draft_requests: requests the drafter runs for, padding included when it is run.
        cache_rows: live cache rows attended in this step, summed over requests.
    """

    sampling: Int[Array, ""]
    base_tokens: Int[Array, ""]
    draft_requests: Int[Array, ""]
    cache_rows: Int[Array, ""]


@flax.struct.dataclass
class Budget:
    """Outcome of a policy.

    Attributes:
        budget: drafted tokens to verify over the whole batch.
        depth: drafts of a block that are walked for it.
        throughput: expected tokens per second at that budget (the scale is 1 without a table).
        gain: that throughput over that of a step without drafts; infinite without a table, and 0
            where nothing may be drafted.
    """

    budget: Int[Array, ""]
    depth: Int[Array, ""]
    throughput: Float[Array, ""]
    gain: Float[Array, ""]


def at_context(table: Float[Array, "C X"], tables: CostTables, rows: Array) -> Float[Array, "X"]:
    """The row of a cost table at ``rows`` live cache rows: linear in between, clamped outside."""
    count = tables.contexts.shape[0]
    if count == 1:
        return table[0]
    rows = jnp.asarray(rows, jnp.float32)
    lower = (tables.contexts <= rows).sum() - 1
    lower = jnp.clip(lower, 0, count - 2)
    start, end = tables.contexts[lower], tables.contexts[lower + 1]
    share = jnp.clip((rows - start) / (end - start), 0.0, 1.0)
    return table[lower] * (1.0 - share) + table[lower + 1] * share


def expected_throughput(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    load: Load,
    tables: CostTables,
) -> Float[Array, "SG+1"]:
    """θ(B) in tokens per second for every budget 0..S·G; -inf above the number of valid slots.

    θ(B) = (N + Σ_{i≤B} a_(i)) / (draft_cost(requests, rows) + verify_cost(N₀ + B, rows)).
    """
    return _by_depth(survival, valid, load, tables, (survival.shape[1],))[0][0]


def _by_depth(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    load: Load,
    tables: CostTables,
    depths: tuple[int, ...],
) -> tuple[Float[Array, "D SG+1"], Int[Array, "D SG+1"]]:
    """θ of blocks walked to each of ``depths``, and the budget that each entry belongs to."""
    key = jnp.where(valid, survival, -1.0).reshape(-1)
    position = jnp.arange(1, survival.shape[1] + 1, dtype=jnp.int32)
    position = jnp.broadcast_to(position, survival.shape).reshape(-1)
    gains = _counted_gains if counts(key.size) else _sorted_gains
    gained, budgets, real = gains(key, position, jnp.asarray(depths, jnp.int32)[:, None])
    verify = at_context(tables.verify, tables, load.cache_rows)
    draft = at_context(tables.draft, tables, load.cache_rows)[load.draft_requests]
    shares = tables.walk[jnp.asarray(depths) - 1][:, None]
    seconds = draft * shares + jnp.take(verify, load.base_tokens + budgets, mode="clip")
    return jnp.where(real, (load.sampling + gained) / seconds, -jnp.inf), budgets


def _counted_gains(key: Array, position: Array, depth: Array) -> tuple[Array, Array, Array]:
    """Summed survivals of every budget by depth, its budget, and whether there is one.

    Every slot counts those ahead of it: two fused loops, where a sort is a dozen launches.
    """
    place = jnp.arange(key.shape[0], dtype=jnp.int32)
    ahead = (key > key[:, None]) | ((key == key[:, None]) & (place < place[:, None]))
    member = (key >= 0) & (position <= depth)
    rank = (ahead & member[:, None]).sum(axis=2, dtype=jnp.int32)
    budget = jnp.arange(key.shape[0] + 1, dtype=jnp.int32)
    taken = member[:, None] & (rank[:, None] < budget[:, None])
    gained = jnp.where(taken, key, 0.0).sum(axis=2)
    real = budget <= member.sum(axis=1, keepdims=True)
    return gained, jnp.broadcast_to(budget, real.shape), real


def _sorted_gains(key: Array, position: Array, depth: Array) -> tuple[Array, Array, Array]:
    """The same by one sort; slots beyond a depth are passed over, so entries may be no budget."""
    ordered, position = jax.lax.sort((-key, position), num_keys=1)
    real = (position <= depth) & (ordered <= 0)
    before = ((0, 0), (1, 0))
    budgets = jnp.pad(jnp.cumsum(real, axis=1, dtype=jnp.int32), before)
    gained = jnp.pad(jnp.cumsum(jnp.where(real, -ordered, 0.0), axis=1), before)
    return gained, budgets, jnp.pad(real, before, constant_values=True)


def undrafted_throughput(load: Load, tables: CostTables) -> Float[Array, ""]:
    """θ_off = N / verify_cost(N₀, rows): tokens per second of a step without drafts."""
    verify = at_context(tables.verify, tables, load.cache_rows)
    return load.sampling / verify[load.base_tokens]


def best_budget(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    load: Load,
    tables: CostTables,
    depths: tuple[int, ...] = (),
) -> Budget:
    """The depth and budget of highest expected throughput, the smallest among equals.

    The policy is in the survivals. ``lagged`` passes those of a step at least one older: exact.
    ``fresh`` passes this step's: biased, because the budget then depends on the very tokens it
    decides about (DSpark paper, appendix A). Without a cost table every valid slot is verified.
    ``depths`` are those a block can be walked to; the full block alone when empty.
    """
    depths = depths or (survival.shape[1],)
    theta, budgets = _by_depth(survival, valid, load, tables, depths)
    chosen = jnp.argmax(theta)
    depth = jnp.asarray(depths, jnp.int32)[chosen // theta.shape[1]]
    return _outcome(
        budgets.reshape(-1)[chosen], depth, theta.reshape(-1)[chosen], valid, load, tables
    )


def causal_budget(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    load: Load,
    tables: CostTables,
) -> Budget:
    """Early stop on this step's survivals (DSpark paper, Algorithm 1): exact.

    Candidates are admitted in descending survival until one fails to raise the throughput, so
    admitting a slot never depends on a later one. On a staircase of costs this may stop at a
    local optimum. Without a cost table every valid slot is verified.
    """
    theta = expected_throughput(survival, valid, load, tables)
    raises = (theta[1:] > theta[:-1]).astype(jnp.int32)
    chosen = jnp.cumprod(raises).sum()
    depth = jnp.asarray(survival.shape[1], jnp.int32)
    return _outcome(chosen, depth, theta[chosen], valid, load, tables)


def _outcome(
    budget: Array,
    depth: Array,
    throughput: Array,
    valid: Bool[Array, "S G"],
    load: Load,
    tables: CostTables,
) -> Budget:
    gain = throughput / undrafted_throughput(load, tables)
    known = tables.known
    return Budget(
        budget=jnp.where(known, budget, valid.sum()).astype(jnp.int32),
        depth=jnp.where(known, depth, valid.shape[1]),
        throughput=jnp.where(known, throughput, load.sampling + valid.sum()),
        gain=jnp.where(valid.any(), jnp.where(known, gain, jnp.inf), 0.0),
    )


def allocate(
    survival: Float[Array, "S G"], valid: Bool[Array, "S G"], budget: Int[Array, ""]
) -> Int[Array, "S"]:
    """Drafts to verify of each request: the ``budget`` slots of highest survival.

    Ties go to the earlier position, then the lower request, never to a token. ``valid`` must be
    a prefix of each row and ``survival`` non-increasing along it, so the chosen slots of a
    request are a prefix as well.
    """
    return top_b(survival, valid, jnp.asarray(budget))
