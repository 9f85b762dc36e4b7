"""Packing in one launch without a search: requests send their tokens to their rows.

A program owns a few requests. It reads the counts of all of them, which are few kilobytes in the
L2, so that it knows where its first one starts without waiting for another program; and it fills
its share of the rows that no request owns. Pallas' Triton lowering is deprecated in JAX; the body
could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from pallas_kernels.choice import empty
from pallas_kernels.lowered_once import lowered_once

MOST_REQUESTS = 1 << 13
"""Counts that a program can hold; it holds all of them."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How requests are dealt to programs.

    Attributes:
        requests: requests of a program; a power of two.
        warps: warps of a program.
    """

    requests: int = 16
    warps: int = 4


DEFAULT = Tuning()


def unsupported(
    tokens: jax.Array | jax.ShapeDtypeStruct,
    start: jax.Array | jax.ShapeDtypeStruct,
    count: jax.Array | jax.ShapeDtypeStruct,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("tokens", tokens), ("start", start), ("count", count)):
        if operand.dtype != jnp.int32:
            return f"the dtype of {name} is {operand.dtype}, wanted int32"
    if not 0 < tokens.shape[0] <= MOST_REQUESTS:
        return f"there are {tokens.shape[0]} requests, wanted 1 to {MOST_REQUESTS}"
    return empty(tokens=tokens)


@lowered_once("size", "tuning", "interpret")
def ragged_pack(
    tokens: Int[Array, "S W"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    size: int,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> tuple[Int[Array, "T"], Int[Array, "T"], Int[Array, "T"], Int[Array, "S W"]]:
    """The operation of `reference.ragged_pack` for operands that `unsupported` passes."""
    requests, width = tokens.shape
    programs = pl.cdiv(requests, tuning.requests)
    share = pl.cdiv(size, programs)
    cells = (tuning.requests, pl.next_power_of_2(width))

    def kernel(tokens_ref: Any, start_ref: Any, count_ref: Any, *out_refs: Any) -> None:
        *packed_refs, row_ref = out_refs
        first = pl.program_id(0) * tuning.requests
        every = jnp.arange(pl.next_power_of_2(requests))
        counts = plt.load(count_ref.at[every], mask=every < requests, other=0)
        before = jnp.where(every < first, counts, 0).sum()

        request = first + jnp.arange(tuning.requests)
        inside = request < requests
        own = plt.load(count_ref.at[request], mask=inside, other=0)
        earlier = jnp.arange(tuning.requests)[None] < jnp.arange(tuning.requests)[:, None]
        begin = before + jnp.where(earlier, own[None], 0).sum(axis=1)
        position = plt.load(start_ref.at[request], mask=inside, other=0)
        column = jnp.broadcast_to(jnp.arange(cells[1])[None], cells)
        request, inside, own, begin, position = (
            jnp.broadcast_to(x[:, None], cells) for x in (request, inside, own, begin, position)
        )
        inside = inside & (column < width)
        # A row past the end, so that the interpreter drops what the mask hides.
        row = jnp.where(inside & (column < own), begin + column, size)
        token = plt.load(tokens_ref.at[request, column], mask=inside, other=0)
        plt.store(row_ref.at[request, column], row, mask=inside)
        for ref, value in zip(packed_refs, (token, request, position + column), strict=True):
            plt.store(ref.at[row], value, mask=row < size)

        within = jnp.arange(pl.next_power_of_2(share))
        row = pl.program_id(0) * share + within
        free = (within < share) & (row < size) & (row >= counts.sum())
        row = jnp.where(free, row, size)
        for ref, value in zip(packed_refs, (0, requests, 0), strict=True):
            plt.store(ref.at[row], jnp.full(row.shape, value, jnp.int32), mask=free)

    packed = jax.ShapeDtypeStruct((size,), jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=(packed, packed, packed, jax.ShapeDtypeStruct(tokens.shape, jnp.int32)),
        grid=(programs,),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="ragged_pack",
    )(tokens, start, count)
