"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.rope_write import pallas_triton, reference

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where both can run (docs/kernels/rope_write.md has the times)."""


def rope_write(
    fused: Float[Array, "T (H+2N)E"],
    cos: Float[Array, "T E/2"],
    sin: Float[Array, "T E/2"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
    *,
    q_norm: Float[Array, "E"] | None = None,
    k_norm: Float[Array, "E"] | None = None,
    eps: float = 0.0,
    finite: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T H E"], Float[Array, "S N K E"], Float[Array, "S N K E"]]:
    """Rotate fresh query and key heads, and put keys and values into their cache rows.

    Row t of ``fused`` holds H query heads, then N key heads, then N value heads, as one product
    makes them; H may be 0. Its key and value go to row ``position[t]`` of slot ``slot[t]``; a
    slot or position outside the cache, on either side, writes nothing. No two rows may name the
    same place. Norms and rotation are fp32, each rounded to the dtype of ``fused``.

    Args:
        fused: query, key and value heads.
        cos: cosines of the rotary phases, fp32.
        sin: sines of the rotary phases, fp32.
        keys: cached keys; written in place where the caller's buffer allows.
        values: as ``keys``.
        slot: cache slot of each row.
        position: cache row of each row.
        q_norm: weight of the RMS norm of every query head before rotation (Qwen3), or None.
        k_norm: the same for key heads.
        eps: added to the mean square in both norms.
        finite: replace NaN by 0 and infinities by the largest numbers in what is cached.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, bf16, a power
            of two of at least 32 for E and no empty operand, and has no gradient. None takes
            `AUTOMATIC` where that can run and xla elsewhere.

    Returns:
        Rotated query heads ``[T, H, E]``, and both caches.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    _check_shapes(fused, cos, sin, keys, values, slot, position)
    wanted = choose(
        "rope_write",
        "triton",
        implementation,
        AUTOMATIC,
        lambda: missing_hopper() or pallas_triton.unsupported(fused, keys, values),
    )
    run = {"xla": reference.rope_write, "triton": pallas_triton.rope_write}[wanted]
    return run(fused, cos, sin, keys, values, slot, position, q_norm, k_norm, eps, finite)


def _check_shapes(
    fused: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slot: jax.Array,
    position: jax.Array,
) -> None:
    if fused.ndim != 2 or keys.ndim != 4:
        raise ValueError(
            f"fused and keys have {fused.ndim} and {keys.ndim} axes, wanted [T, (H+2N)E] and "
            "[S, N, K, E]"
        )
    if values.shape != keys.shape:
        raise ValueError(f"values have shape {values.shape}, wanted that of keys, {keys.shape}")
    rows, width = fused.shape
    _, groups, _, head_dim = keys.shape
    if head_dim == 0 or width % head_dim or width < 2 * groups * head_dim:
        raise ValueError(
            f"fused rows hold {width} numbers, wanted H + 2*{groups} heads of {head_dim}"
        )
    for name, phase in (("cos", cos), ("sin", sin)):
        if phase.shape != (rows, head_dim // 2):
            raise ValueError(f"{name} has shape {phase.shape}, wanted {(rows, head_dim // 2)}")
    for name, index in (("slot", slot), ("position", position)):
        if index.shape != (rows,):
            raise ValueError(f"{name} has shape {index.shape}, wanted {(rows,)}")
