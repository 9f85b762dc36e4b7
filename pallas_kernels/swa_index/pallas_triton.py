"""Window rows and their counts in one launch: a program writes the lists of a few tokens.

Pallas' Triton lowering is deprecated in JAX; the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from pallas_kernels.choice import empty


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How tokens are dealt to programs.

    Attributes:
        tokens: tokens of a program; a power of two.
        warps: warps of a program.
    """

    tokens: int = 4
    warps: int = 4


DEFAULT = Tuning()


def unsupported(
    position: jax.Array | jax.ShapeDtypeStruct,
    request: jax.Array | jax.ShapeDtypeStruct,
    ring: jax.Array | jax.ShapeDtypeStruct,
    origin: jax.Array | jax.ShapeDtypeStruct,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    named = {"position": position, "request": request, "ring": ring, "origin": origin}
    for name, operand in named.items():
        if operand.dtype != jnp.int32:
            return f"the dtype of {name} is {operand.dtype}, wanted int32"
    return empty(position=position, ring=ring)


@functools.partial(jax.jit, static_argnames=("window", "length", "tuning", "interpret"))
def swa_index(
    position: Int[Array, "T"],
    request: Int[Array, "T"],
    ring: Int[Array, "A"],
    origin: Int[Array, "A"],
    window: int,
    length: int,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> tuple[Int[Array, "T w"], Int[Array, "T"]]:
    """The operation of `reference.swa_index` for operands that `unsupported` passes."""
    tokens, requests = position.shape[0], ring.shape[0]
    cells = (tuning.tokens, pl.next_power_of_2(window))

    def kernel(
        position_ref: Any,
        request_ref: Any,
        ring_ref: Any,
        origin_ref: Any,
        rows_ref: Any,
        count_ref: Any,
    ) -> None:
        token = pl.program_id(0) * tuning.tokens + jnp.arange(tuning.tokens)
        inside = token < tokens
        last = plt.load(position_ref.at[token], mask=inside, other=-1)
        owner = plt.load(request_ref.at[token], mask=inside, other=requests)
        known = owner < requests
        owner = jnp.where(known, owner, 0)
        page = plt.load(ring_ref.at[owner], mask=known, other=-1)
        begin = plt.load(origin_ref.at[owner], mask=known, other=0)
        plt.store(count_ref.at[token], jnp.clip(last + 1, 0, window), mask=inside)

        column = jnp.broadcast_to(jnp.arange(cells[1])[None], cells)
        token, inside, last, page, begin = (
            jnp.broadcast_to(x[:, None], cells) for x in (token, inside, last, page, begin)
        )
        seen = jnp.maximum(last - window + 1, 0) + column
        row = page * length + (seen - begin) % length
        row = jnp.where((seen <= last) & (page >= 0), row, -1)
        plt.store(rows_ref.at[token, column], row, mask=inside & (column < window))

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((tokens, window), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        ),
        grid=(pl.cdiv(tokens, tuning.tokens),),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="swa_index",
    )(position, request, ring, origin)
