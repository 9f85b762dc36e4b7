"""Mixture of experts: which experts a token is sent to, and what they compute.

Tokens are sorted by expert and run in blocks of rows of one expert. JAX expands
``jax.lax.ragged_dot`` on CPUs to all rows times all experts; here a matrix is read once for each
block of its tokens, and memory grows with the tokens alone. Blocks run one after another, or on
a GPU beside each other in a kernel.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.layers import linear
from pallas_kernels import block_linear as block_products
from pallas_kernels.block_linear import block_linear
from pallas_kernels.choice import choose

LARGEST_BLOCK = 128


@flax.struct.dataclass
class Experts:
    """X SwiGLU experts of width F; ``gate_up`` rows hold the gate half, then the up half."""

    gate_up: Float[Array, "X 2F D"]
    down: Float[Array, "X D F"]


def choose_experts(
    scores: Float[Array, "T X"],
    bias: Float[Array, "X"],
    count: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
) -> Int[Array, "T c"]:
    """The ``count`` experts of largest ``scores + bias`` for each token, best first.

    With ``groups`` only the ``kept_groups`` groups of neighbouring experts take part whose two
    best experts have the largest sum (DeepSeek-V3 report, section 2.1.2: node-limited routing).
    """
    biased = scores + bias
    if groups > 1:
        grouped = biased.reshape(biased.shape[0], groups, -1)
        merit = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        kept = jax.lax.top_k(merit, kept_groups)[1]
        inside = (kept[:, :, None] == jnp.arange(groups)).any(axis=1)
        biased = jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    return jax.lax.top_k(biased, count)[1].astype(jnp.int32)


def weigh_experts(
    scores: Float[Array, "T X"], ids: Int[Array, "T c"], scale: float
) -> Float[Array, "T c"]:
    """Scores of the chosen experts, without any bias, normalised to sum to ``scale``."""
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    return chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scale


def expert(
    x: Float[Array, "T D"],
    gate_up: Float[Array, "2F D"],
    down: Float[Array, "D F"],
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """One SwiGLU expert, joined in fp32; ``limit`` caps the gate above and up on both sides."""
    return linear(_joined(linear(x, gate_up), limit), down)


def _joined(gate_up: Float[Array, "... 2F"], limit: float | None) -> Float[Array, "... F"]:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def routed_experts(
    x: Float[Array, "T D"],
    ids: Int[Array, "T c"],
    weights: Float[Array, "T c"],
    experts: Experts,
    *,
    limit: float | None = None,
    implementation: block_products.Implementation | None = None,
) -> Float[Array, "T D"]:
    """The weighted sum of each token's experts, accumulated in fp32, in the dtype of ``x``.

    Args:
        x: token rows.
        ids: experts of each token; one named twice counts twice, and one outside ``0..X-1`` adds
            nothing (padding).
        weights: fp32 weight of each of them.
        experts: matrices of all experts.
        limit: as in ``expert``.
        implementation: ``"xla"`` runs blocks one after another, anywhere and with a gradient;
            ``"triton"`` beside each other, where ``pallas_kernels.block_linear`` can. None takes
            what that takes.

    Raises:
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    tokens, each = ids.shape
    number = experts.gate_up.shape[0]
    least = block_products.LEAST_SIZE
    size = _block_size(tokens, tokens * each, number)

    def obstacle() -> str | None:
        return block_products.obstacle(
            x, experts.gate_up, max(size, least)
        ) or block_products.obstacle(x, experts.down, max(size, least))

    wanted = choose("routed_experts", "triton", implementation, block_products.AUTOMATIC, obstacle)
    if wanted == "triton":
        return _beside(x, weights, experts, _blocks(ids, number, max(size, least)), limit)
    return _one_by_one(x, weights, experts, _blocks(ids, number, size), limit)


@flax.struct.dataclass
class Blocks:
    """Tokens of one expert each; B of S places, where T tokens and P pairs end the count.

    Attributes:
        owner: expert of each block.
        used: whether a block holds any token.
        pair: ``[B, S]`` token and choice in each place, as one number; P where there is none.
        token: ``[B, S]`` the token; T where there is none.
    """

    owner: Int[Array, "B"]
    used: Bool[Array, "B"]
    pair: Int[Array, "B S"]
    token: Int[Array, "B S"]


def _blocks(ids: Int[Array, "T c"], number: int, size: int) -> Blocks:
    """Pairs of token and expert, sorted by expert, in blocks of ``size`` places."""
    tokens, each = ids.shape
    pairs = tokens * each
    most = min(pairs, (pairs + (size - 1) * min(number, pairs)) // size)
    flat = jnp.where((ids >= 0) & (ids < number), ids, number).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows_of = jnp.zeros(number, jnp.int32).at[flat].add(1, mode="drop")
    row_end = jnp.cumsum(rows_of)
    blocks_of = -(-rows_of // size)
    block_end = jnp.cumsum(blocks_of)
    block = jnp.arange(most, dtype=jnp.int32)
    owner = (block_end <= block[:, None]).sum(axis=1, dtype=jnp.int32)
    used = owner < number
    owner = jnp.minimum(owner, number - 1)
    first = (row_end - rows_of)[owner] + (block - (block_end - blocks_of)[owner]) * size
    row = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    real = used[:, None] & (row < row_end[owner][:, None])
    pair = jnp.where(real, order[jnp.where(real, row, 0)], pairs)
    return Blocks(owner, used, pair, jnp.where(real, pair // each, tokens))


def _one_by_one(
    x: Float[Array, "T D"],
    weights: Float[Array, "T c"],
    experts: Experts,
    blocks: Blocks,
    limit: float | None,
) -> Float[Array, "T D"]:
    weight = jnp.take(weights.reshape(-1), blocks.pair, mode="fill", fill_value=0)

    def add(total: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        owner, used, token, weight = block

        def run(total: Array) -> Array:
            rows = jnp.take(x, token, axis=0, mode="fill", fill_value=0)
            out = expert(rows, experts.gate_up[owner], experts.down[owner], limit)
            return total.at[token].add(weight[:, None] * out, mode="drop")

        return jax.lax.cond(used, run, lambda total: total, total), None

    # a gradient recomputes a block instead of keeping the matrices of every block
    add = jax.checkpoint(add, prevent_cse=False)
    total = jnp.zeros(x.shape, jnp.float32)
    every = blocks.owner, blocks.used, blocks.token, weight
    return jax.lax.scan(add, total, every)[0].astype(x.dtype)


def _beside(
    x: Float[Array, "T D"],
    weights: Float[Array, "T c"],
    experts: Experts,
    blocks: Blocks,
    limit: float | None,
) -> Float[Array, "T D"]:
    """All blocks in two products; then every token gathers what its experts made of it."""
    owner = jnp.where(blocks.used, blocks.owner, experts.gate_up.shape[0])
    places = blocks.pair.size
    both = block_linear(x, blocks.token, experts.gate_up, owner, implementation="triton")
    inner = _joined(both, limit).reshape(places, -1)
    here = jnp.arange(places, dtype=jnp.int32).reshape(blocks.pair.shape)
    out = block_linear(inner, here, experts.down, owner, implementation="triton")
    place = jnp.full(weights.size, places, jnp.int32)
    place = place.at[blocks.pair].set(here, mode="drop").reshape(weights.shape)
    own = jnp.take(out.reshape(places, -1), place, axis=0, mode="fill", fill_value=0)
    return (weights[..., None] * own).sum(axis=1).astype(x.dtype)


def _block_size(tokens: int, pairs: int, number: int) -> int:
    """Rows a block: four times an expert's fair share, so that most need one block."""
    most = min(LARGEST_BLOCK, tokens, -(-4 * pairs // number))
    return 1 << (most - 1).bit_length()
