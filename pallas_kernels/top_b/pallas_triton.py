"""Allocation in one launch without a sort: every slot counts the slots ahead of it.

A batch has a few thousand slots. Comparing all pairs is a few million comparisons, which the
whole GPU does in microseconds and without one program waiting for another, whereas a sort takes
dozens of passes. A slot is taken if fewer than ``budget`` slots are ahead of it, so ties need no
care beyond the comparison itself. Pallas' Triton lowering is deprecated in JAX; the body could
move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lowered_once import lowered_once

MOST_SLOTS = 1 << 15
"""Above, the pairs cost more than a sort."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is cut.

    Attributes:
        requests: requests of a program; a power of two.
        chunk: slots compared at once; a power of two.
        warps: warps of a program.
    """

    requests: int = 4
    chunk: int = 128
    warps: int = 4


DEFAULT = Tuning()


def unsupported(survival: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel cannot take these survivals, naming the value found and wanted, or None."""
    if survival.dtype != jnp.float32:
        return f"the dtype of survival is {survival.dtype}, wanted float32"
    if not 0 < survival.size <= MOST_SLOTS:
        return f"survival has {survival.size} slots, wanted 1 to {MOST_SLOTS}"
    return None


@lowered_once("tuning", "interpret")
def top_b(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    budget: Int[Array, ""],
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Int[Array, "S"]:
    """The operation of `reference.top_b` for operands that `unsupported` passes."""
    requests, depth = survival.shape
    slots = requests * depth
    rows = pl.next_power_of_2(depth) * tuning.requests

    def kernel(key_ref: Any, budget_ref: Any, out_ref: Any) -> None:
        within = jnp.arange(rows)
        request = pl.program_id(0) * tuning.requests + (within & (tuning.requests - 1))
        position = within >> (tuning.requests.bit_length() - 1)
        inside = (request < requests) & (position < depth)
        # Flattened by position first, so that the place settles ties.
        own_place = position * requests + request
        own = plt.load(key_ref.at[jnp.where(inside, own_place, 0)], mask=inside, other=-1.0)

        def compare(chunk: jax.Array, ahead: jax.Array) -> jax.Array:
            place = chunk * tuning.chunk + jnp.arange(tuning.chunk)
            key = plt.load(key_ref.at[place], mask=place < slots, other=-2.0)
            higher = key[None] > own[:, None]
            earlier = (key[None] == own[:, None]) & (place[None] < own_place[:, None])
            return ahead + (higher | earlier).astype(jnp.int32)

        ahead = jnp.zeros((rows, tuning.chunk), jnp.int32)
        ahead = lax.fori_loop(0, pl.cdiv(slots, tuning.chunk), compare, ahead).sum(axis=1)
        taken = (own >= 0) & (ahead < budget_ref[0])
        window = taken.astype(jnp.int32).reshape(-1, tuning.requests).sum(axis=0)
        at = pl.program_id(0) * tuning.requests + jnp.arange(tuning.requests)
        plt.store(out_ref.at[at], window, mask=at < requests)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((requests,), jnp.int32),
        grid=(pl.cdiv(requests, tuning.requests),),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="top_b",
    )(jnp.where(valid, survival, -1.0).T.reshape(-1), budget.astype(jnp.int32).reshape(1))
