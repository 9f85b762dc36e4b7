"""A position of the walk in two launches: tiles of the vocabulary, then what they found.

A program of the first owns a tile of the vocabulary for up to 64 requests. It multiplies, adds the
base logits, divides by the temperature, writes the scores and draws: each score is touched once,
in registers, and the noise never exists in memory. What remains of a tile is its best perturbed
score with its column and the sum of its exponentials; a program of the second launch joins those
of a request, and computes its confidence beside. Pallas' Triton lowering is deprecated in JAX;
the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.markov_sample.operands import Confidence, Position, Sample
from pallas_kernels.markov_sample.threefry import gumbel

BEST, COLUMN, CHOSEN, HIGHEST, TOTAL = range(5)
"""What a tile leaves of a request: best perturbed score, its column and its score; largest score
and the sum of exponentials relative to it. All fp32: columns are below 2**24, hence exact."""

MOST_COLUMNS = 1 << 24
RANKS = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the first launch is cut.

    Attributes:
        tile: columns of a program; a power of two.
        rows: requests of a program, at most; a power of two of at least 16.
        warps: warps of a program.
    """

    tile: int = 64
    rows: int = 64
    warps: int = 4


DEFAULT = Tuning()


def unsupported(operands: Position) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    base, ranked, matrix = operands.base, operands.ranked, operands.matrix
    if base.dtype != jnp.float32:
        return f"the dtype of base is {base.dtype}, wanted float32"
    for name, operand in (("ranked", ranked), ("matrix", matrix)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    if matrix.shape[1] not in RANKS:
        return f"the rank is {matrix.shape[1]}, wanted one of {', '.join(map(str, RANKS))}"
    if matrix.shape[0] >= MOST_COLUMNS:
        return f"the vocabulary has {matrix.shape[0]} columns, wanted fewer than {MOST_COLUMNS}"
    if operands.keys is not None:
        wanted = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
        if operands.keys.dtype != wanted:
            return f"the dtype of keys is {operands.keys.dtype}, wanted {wanted}"
        if not jax.config.jax_threefry_partitionable:  # type: ignore
            return "jax_threefry_partitionable is off, wanted on"
    return None


@functools.partial(jax.jit, static_argnames=("depth", "tuning", "interpret"))
def markov_sample(
    operands: Position,
    scores: Float[Array, "S G Vd"] | None,
    index: int | Int[Array, ""],
    depth: int,
    *,
    last: bool | Bool[Array, ""] = False,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Sample:
    """The operation of `reference.markov_sample` for operands that `unsupported` passes.

    Positions that no call has written hold anything. Jitted, with the position as an operand, so
    that a walk traces, lowers and compiles one position.
    """
    index = jnp.asarray(index, jnp.int32)
    span = jnp.stack([index, jnp.where(last, depth, index + 1)]).astype(jnp.int32)
    partial, scores = _tiles(operands, scores, span, depth, tuning, interpret)
    column, *rest = _join(partial, operands, interpret)
    logprob = rest.pop(0) if operands.keys is not None else None
    return Sample(column, scores, logprob, rest.pop(0) if rest else None)


def _tiles(
    operands: Position,
    scores: Float[Array, "S G Vd"] | None,
    span: Int[Array, "2"],
    depth: int,
    tuning: Tuning,
    interpret: bool,
) -> tuple[Float[Array, "S X P"], Float[Array, "S G Vd"] | None]:
    """What the tiles leave, and the scores at ``span[0]`` with zeros up to ``span[1]``."""
    requests, _, columns = operands.base.shape
    rank = operands.ranked.shape[1]
    rows = min(tuning.rows, max(16, pl.next_power_of_2(requests)))
    tiles = pl.cdiv(columns, tuning.tile)
    sampled = operands.keys is not None

    def kernel(*refs: Any) -> None:
        span_ref, base_ref, ranked_ref, matrix_ref, temperature_ref, *keys_ref = refs[:inputs]
        partial_ref, *scores_ref = refs[given:]
        index = span_ref[0]
        tile = pl.program_id(1)
        row = pl.program_id(0) * rows + jnp.arange(rows)
        column = tile * tuning.tile + jnp.arange(tuning.tile)
        known_row, known_column = row < requests, column < columns
        across = jnp.broadcast_to(row[:, None], (rows, tuning.tile))
        along = jnp.broadcast_to(column[None], across.shape)
        mask = known_row[:, None] & known_column[None]

        in_rank = jnp.arange(rank)
        matrix = plt.load(
            matrix_ref.at[
                jnp.broadcast_to(column[:, None], (tuning.tile, rank)),
                jnp.broadcast_to(in_rank[None], (tuning.tile, rank)),
            ],
            mask=jnp.broadcast_to(known_column[:, None], (tuning.tile, rank)),
            other=0.0,
        )
        ranked = plt.load(
            ranked_ref.at[
                jnp.broadcast_to(row[:, None], (rows, rank)),
                jnp.broadcast_to(in_rank[None], (rows, rank)),
            ],
            mask=jnp.broadcast_to(known_row[:, None], (rows, rank)),
            other=0.0,
        )
        base = plt.load(
            base_ref.at[across, jnp.full(across.shape, index), along], mask=mask, other=-jnp.inf
        )
        score = base + lax.dot_general(
            ranked, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

        def leave(field: int, value: jax.Array) -> None:
            at = partial_ref.at[row, jnp.full(row.shape, field), jnp.full(row.shape, tile)]
            plt.store(at, value, mask=known_row)

        drawn = score
        if sampled:
            temperature = plt.load(temperature_ref.at[row], mask=known_row, other=0.0)
            score = score / jnp.where(temperature == 0, 1.0, temperature)[:, None]
            at = scores_ref[-1].at[across, jnp.full(across.shape, index), along]
            plt.store(at, score, mask=mask)

            @pl.loop(index + 1, span_ref[1])
            def _(position: jax.Array) -> None:
                at = scores_ref[-1].at[across, jnp.full(across.shape, position), along]
                plt.store(at, jnp.zeros_like(score), mask=mask)

            first, second = (
                plt.load(keys_ref[0].at[row, jnp.full(row.shape, word)], mask=known_row, other=0)
                for word in range(2)
            )

            def perturbed() -> jax.Array:
                noise = gumbel(first[:, None], second[:, None], along.astype(jnp.uint32))
                return jnp.where(temperature[:, None] == 0, score, score + noise)

            drawn = lax.cond(jnp.max(temperature) > 0, perturbed, lambda: score)
        best = drawn.max(axis=1)
        at_best = jnp.where((drawn == best[:, None]) & mask, column[None], columns - 1)
        chosen = at_best.min(axis=1)
        leave(BEST, best)
        leave(COLUMN, chosen.astype(jnp.float32))
        if sampled:
            only = jnp.where(column[None] == chosen[:, None], score, -jnp.inf)
            leave(CHOSEN, only.max(axis=1))
            highest = score.max(axis=1)
            leave(HIGHEST, highest)
            leave(TOTAL, jnp.exp(score - _finite(highest)[:, None]).sum(axis=1))

    arguments = [span, operands.base, operands.ranked, operands.matrix, operands.temperature]
    if operands.keys is not None:
        arguments.append(jax.random.key_data(operands.keys))
    inputs = given = len(arguments)
    out = [jax.ShapeDtypeStruct((requests, 5 if sampled else 2, tiles), jnp.float32)]
    aliases = {}
    if sampled:
        shape = (requests, depth, columns)
        out.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        arguments.append(lax.empty(shape, jnp.float32) if scores is None else scores)
        given, aliases = inputs + 1, {inputs: 1}
    partial, *scored = pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(pl.cdiv(requests, rows), tiles),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="markov_sample",
    )(*arguments)
    return partial, scored[0] if scored else None


def _join(partial: Float[Array, "S X P"], operands: Position, interpret: bool) -> tuple[Array, ...]:
    """Column, log-probability if there is noise, confidence if there is a head."""
    requests, _, tiles = partial.shape
    head = operands.confidence
    sampled = operands.keys is not None

    def kernel(*refs: Any) -> None:
        partial_ref, *head_refs = refs[: len(arguments)]
        column_ref, *rest = refs[len(arguments) :]
        row = pl.program_id(0)
        tile = jnp.arange(pl.next_power_of_2(tiles))

        def left(field: int, other: float) -> jax.Array:
            place = (jnp.full(tile.shape, row), jnp.full(tile.shape, field))
            at = partial_ref.at[*place, jnp.where(tile < tiles, tile, 0)]
            return plt.load(at, mask=tile < tiles, other=other)

        best, column = left(BEST, -jnp.inf), left(COLUMN, float(MOST_COLUMNS))
        column_of_best = jnp.where(best == best.max(), column, float(MOST_COLUMNS)).min()
        last = operands.base.shape[2] - 1
        column_ref[row] = jnp.minimum(column_of_best.astype(jnp.int32), last)
        if sampled:
            chosen = jnp.where(column == column_of_best, left(CHOSEN, -jnp.inf), -jnp.inf).max()
            highest = left(HIGHEST, -jnp.inf)
            ceiling = _finite(highest.max())
            total = (left(TOTAL, 0.0) * jnp.exp(highest - ceiling)).sum()
            rest[0][row] = chosen - (ceiling + jnp.log(total))
        if head is not None:
            rest[-1][row] = _confidence(head, head_refs, row)

    arguments: list[jax.Array] = [partial]
    if head is not None:
        optional = (head.embedding, None if head.bias is None else head.bias.reshape(1))
        arguments += [head.hidden, head.weight.reshape(-1)]
        arguments += [operand for operand in optional if operand is not None]
    of_request = jax.ShapeDtypeStruct((requests,), jnp.float32)
    out = [jax.ShapeDtypeStruct((requests,), jnp.int32)]
    out += [of_request] * (int(sampled) + int(head is not None))
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=out,
            grid=(requests,),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="markov_sample_join",
        )(*arguments)
    )


def _confidence(head: Confidence, refs: list[Any], row: jax.Array) -> jax.Array:
    """``weight . [hidden; embedding] + bias`` of one request."""
    hidden_ref, weight_ref, *optional = refs

    def product(ref: Any, width: int, start: int) -> jax.Array:
        at = jnp.arange(pl.next_power_of_2(width))
        inside = at < width
        at = jnp.where(inside, at, 0)
        value = plt.load(ref.at[jnp.full(at.shape, row), at], mask=inside, other=0.0)
        weight = plt.load(weight_ref.at[start + at], mask=inside, other=0.0)
        return (value.astype(jnp.float32) * weight.astype(jnp.float32)).sum()

    width = head.hidden.shape[1]
    logit = product(hidden_ref, width, 0)
    if head.embedding is not None:
        logit = logit + product(optional[0], head.embedding.shape[1], width)
    if head.bias is not None:
        logit = logit + optional[-1][0].astype(jnp.float32)
    return logit


def _finite(highest: jax.Array) -> jax.Array:
    """What to subtract before exponentials: 0 where every score is -inf."""
    return jnp.where(highest == -jnp.inf, 0.0, highest)
