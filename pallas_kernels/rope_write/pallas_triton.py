"""RoPE and cache writes in one launch: a program handles one head of a few rows.

The caches are aliased in place and only the named rows of them are touched. Rows are few while
decoding, so a program then takes a single row: what counts is one round trip to memory, not
throughput. Pallas' Triton lowering is deprecated in JAX; the kernel body would move to Mosaic
GPU, or to jax_triton, as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import empty
from pallas_kernels.lowered_once import lowered_once


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How rows are dealt to programs.

    Attributes:
        rows: rows of a program; a power of two.
        warps: warps of a program.
    """

    rows: int
    warps: int


FEW = Tuning(rows=1, warps=1)
MANY = Tuning(rows=16, warps=4)
_FEW_ROWS = 256


def tuning_for(rows: int) -> Tuning:
    """One row a program until that many programs no longer start at once."""
    return FEW if rows <= _FEW_ROWS else MANY


def unsupported(
    fused: jax.Array | jax.ShapeDtypeStruct,
    keys: jax.Array | jax.ShapeDtypeStruct,
    values: jax.Array | jax.ShapeDtypeStruct,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("fused", fused), ("keys", keys), ("values", values)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    head_dim = keys.shape[3]
    if head_dim < 32 or head_dim & (head_dim - 1):
        return f"head width E is {head_dim}, wanted a power of two of at least 32"
    return empty(fused=fused, keys=keys)


@lowered_once("eps", "finite", "tuning", "interpret")
def rope_write(
    fused: Float[Array, "T (H+2N)E"],
    cos: Float[Array, "T E/2"],
    sin: Float[Array, "T E/2"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
    q_norm: Float[Array, "E"] | None,
    k_norm: Float[Array, "E"] | None,
    eps: float,
    finite: bool,
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H E"], Float[Array, "S N K E"], Float[Array, "S N K E"]]:
    """The operation of `reference.rope_write` for operands that `unsupported` passes.

    Not differentiable.
    """
    rows = fused.shape[0]
    slots, groups, capacity, head_dim = keys.shape
    heads = fused.shape[1] // head_dim - 2 * groups
    tuning = tuning or tuning_for(rows)
    half = head_dim // 2

    def kernel(*refs: Any) -> None:
        fused_ref, cos_ref, sin_ref, slot_ref, position_ref, *norms = refs[: len(operands) - 2]
        keys_ref, values_ref, *query_ref = refs[len(operands) :]
        norms = dict(zip(norm_names, norms, strict=True))
        head = pl.program_id(1)
        row = pl.program_id(0) * tuning.rows + jnp.arange(tuning.rows)
        inside = row < rows
        column = jnp.arange(half)[None]
        across = jnp.broadcast_to(row[:, None], (tuning.rows, half))
        mask = jnp.broadcast_to(inside[:, None], across.shape)
        halves = [column + jnp.zeros_like(across), half + column + jnp.zeros_like(across)]

        def read(ref: Any, *index: Any) -> jax.Array:
            return plt.load(ref.at[index], mask=mask, other=0.0)

        def fresh() -> list[jax.Array]:
            return [
                read(fused_ref, across, head * head_dim + part).astype(jnp.float32)
                for part in halves
            ]

        def normed(parts: list[jax.Array], ref: Any) -> list[jax.Array]:
            # The roundings are those of rms_norm on bf16 heads.
            square = sum((part * part).sum(axis=1) for part in parts)
            scale = jax.lax.rsqrt(square / head_dim + eps)[:, None]
            weights = [plt.load(ref.at[part]).astype(jnp.float32) for part in halves]
            scaled = [_rounded(part * scale) for part in parts]
            return [_rounded(part * weight) for part, weight in zip(scaled, weights, strict=True)]

        def turned(parts: list[jax.Array]) -> list[jax.Array]:
            cosine, sine = read(cos_ref, across, halves[0]), read(sin_ref, across, halves[0])
            first, second = parts
            return [first * cosine - second * sine, second * cosine + first * sine]

        def write(ref: Any, group: jax.Array, parts: list[jax.Array]) -> None:
            to_slot = plt.load(slot_ref.at[row], mask=inside, other=-1)
            to_row = plt.load(position_ref.at[row], mask=inside, other=-1)
            kept = (to_slot >= 0) & (to_slot < slots) & (to_row >= 0) & (to_row < capacity)
            # An index past the end, so that the interpreter drops what the mask hides.
            to_slot = jnp.where(kept, to_slot, slots)
            target = [jnp.broadcast_to(index[:, None], across.shape) for index in (to_slot, to_row)]
            kept = jnp.broadcast_to(kept[:, None], across.shape)
            for part, place in zip(parts, halves, strict=True):
                out = _finite(part, ref.dtype) if finite else part
                at = ref.at[target[0], jnp.full(across.shape, group), target[1], place]
                plt.store(at, out.astype(ref.dtype), mask=kept)

        if heads:

            @pl.when(head < heads)
            def _() -> None:
                parts = fresh()
                if "query" in norms:
                    parts = normed(parts, norms["query"])
                for part, place in zip(turned(parts), halves, strict=True):
                    at = query_ref[0].at[across, jnp.full(across.shape, head), place]
                    plt.store(at, part.astype(fused.dtype), mask=mask)

        @pl.when((head >= heads) & (head < heads + groups))
        def _() -> None:
            parts = fresh()
            if "key" in norms:
                parts = normed(parts, norms["key"])
            write(keys_ref, head - heads, [_rounded(part) for part in turned(parts)])

        @pl.when(head >= heads + groups)
        def _() -> None:
            write(values_ref, head - heads - groups, fresh())

    norms = [("query", q_norm), ("key", k_norm)]
    norm_names = [name for name, weight in norms if weight is not None]
    operands = [
        fused,
        cos,
        sin,
        slot.astype(jnp.int32),
        position.astype(jnp.int32),
        *(weight for _, weight in norms if weight is not None),
        keys,
        values,
    ]
    cached = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    query = jax.ShapeDtypeStruct((rows, heads, head_dim), fused.dtype)
    keys, values, *rotated = pl.pallas_call(
        kernel,
        out_shape=[cached, cached, *([query] if heads else [])],
        grid=(pl.cdiv(rows, tuning.rows), heads + 2 * groups),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="rope_write",
    )(*operands)
    return rotated[0] if heads else jnp.zeros(query.shape, query.dtype), keys, values


def _rounded(x: jax.Array) -> jax.Array:
    """fp32 numbers rounded to bf16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _finite(x: jax.Array, dtype: Any) -> jax.Array:
    """``jnp.nan_to_num`` of numbers that will be cast to ``dtype``."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(jnp.where(x != x, 0.0, x), -largest, largest)
