"""The public operations: check operands, pick an implementation, say once what was picked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import Array, Float

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.row_linear import pallas_triton, reference, tiled_triton

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where both can run (docs/kernels/row_linear.md has the times)."""


def rms_linear(
    x: Float[Array, "... D"],
    norm: Float[Array, "D"],
    weight: Float[Array, "O D"],
    *,
    eps: float,
    gated: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "... O"]:
    """``rms_norm(x) @ weight.T``; with ``gated``, ``silu(gate) * up`` of its two halves.

    Args:
        x: input rows.
        norm: weight of the RMS norm, which is computed in fp32 and rounded to the dtype of ``x``.
        weight: the matrix; with ``gated``, all rows of the gate, then all rows of up.
        eps: added to the mean square.
        gated: join the halves of the output as SwiGLU does.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, bf16, at most 16
            rows of at most 2048 numbers, D a multiple of 64 and O of 8 (16 if gated); its
            gradient is that of xla. None takes `AUTOMATIC` where that can run, xla elsewhere.

    Returns:
        ``[..., O]`` (``[..., O/2]`` if gated) in the dtype of ``x``, accumulated in fp32.
        ``"triton"`` rounds elsewhere: it multiplies the norm into the matrix, rounded, and
        scales the fp32 product; a row there does not depend on the rows beside it, to the bit.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    _check_product(x, weight)
    if norm.shape != x.shape[-1:]:
        raise ValueError(f"norm has shape {norm.shape}, wanted {x.shape[-1:]}")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, wanted an even number when gated")
    if _runs("rms_linear", implementation, lambda: pallas_triton.unsupported(x, weight, gated)):
        return pallas_triton.rms_linear(x, norm, weight, eps, gated)
    return reference.rms_linear(x, norm, weight, eps, gated)


def linear_add(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    residual: Float[Array, "... O"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "... O"]:
    """``residual + x @ weight.T``, the product rounded to the dtype of ``x`` before the sum.

    ``implementation``, result and errors are those of `rms_linear`, but that ``"triton"`` takes up
    to 256 rows here; more than 16 have a kernel of their own, and want O a multiple of 16, or of 32
    beyond 128 rows.
    """
    _check_product(x, weight)
    wanted = (*x.shape[:-1], weight.shape[0])
    if residual.shape != wanted:
        raise ValueError(f"residual has shape {residual.shape}, wanted {wanted}")
    few = math.prod(x.shape[:-1]) <= pallas_triton.ROWS
    kernel = pallas_triton if few else tiled_triton
    if _runs("linear_add", implementation, lambda: kernel.unsupported(x, weight)):
        return kernel.linear_add(x, weight, residual)
    return reference.linear_add(x, weight, residual)


def _check_product(x: jax.Array, weight: jax.Array) -> None:
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {weight.shape}, wanted two axes and {x.shape[-1]} columns"
        )


def _runs(
    name: str, implementation: Implementation | None, unsupported: Callable[[], str | None]
) -> bool:
    """Whether the kernel runs."""
    chosen = choose(
        name, "triton", implementation, AUTOMATIC, lambda: missing_hopper() or unsupported()
    )
    return chosen == "triton"
