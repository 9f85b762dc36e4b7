"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.selection import Selection

Implementation = Literal["xla", "mosaic"]


def sparse_mla(
    query: Float[Array, "T H W"],
    keys: Selection,
    extra: Selection | None = None,
    *,
    sm_scale: float,
    sinks: Float[Array, "H"] | None = None,
    value_width: int = 512,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Softmax attention of packed tokens over listed rows of one or two latent caches.

    All heads of a token share its keys, and the first V numbers of a key are its value (absorbed
    MLA; DeepSeek-V3.2: W 576, V 512; DeepSeek-V4: W = V = 512). Tokens are independent of each
    other: a ragged verify batch is its tokens in a row, with causality in their lists. ::

        s_k = sm_scale q · key_k,   lse = log Σ_k e^{s_k}
        out = Σ_k e^{s_k} value_k / (Σ_k e^{s_k} + e^{sink})

    Scores, softmax and sums are fp32. A token whose lists name no row gets zeros and an ``lse``
    of +inf. Rows that a token does not list are not read into its result, whatever they hold
    (NaN included).

    Args:
        query: query rows, positions already encoded.
        keys: rows of one cache that each token attends to.
        extra: rows of another cache, in the same softmax: DeepSeek-V4 attends to a window
            and to compressed rows.
        sm_scale: factor of the scores, positive.
        sinks: per head, the logit (natural, unscaled) of a key without a value; -inf has no
            effect, +inf leaves zeros.
        value_width: V.
        implementation: ``"xla"`` runs anywhere; ``"mosaic"`` needs a Hopper GPU, bf16 (pools
            too), W of 512 or 576, V of 512 and H a multiple of 64. None takes mosaic where it
            can run and xla elsewhere. Neither is meant to be differentiated.

    Returns:
        ``out`` in the dtype of ``query``, and ``lse`` in fp32: natural logarithm, without sinks.

    Raises:
        ValueError: shapes or dtypes disagree, a number is out of its range, or
            ``implementation`` is unknown.
        NotImplementedError: ``"mosaic"`` was asked for and cannot run.
    """
    selections = (keys,) if extra is None else (keys, extra)
    _check(query, selections, sinks, sm_scale, value_width)
    wanted = choose(
        "sparse_mla",
        "mosaic",
        implementation,
        "mosaic",
        lambda: missing_hopper() or mosaic_gpu.unsupported(query, selections, value_width),
    )
    run = {"xla": reference.sparse_mla, "mosaic": mosaic_gpu.sparse_mla}[wanted]
    return run(query, selections, sinks, sm_scale, value_width)


def _check(
    query: jax.Array,
    selections: tuple[Selection, ...],
    sinks: jax.Array | None,
    sm_scale: float,
    value_width: int,
) -> None:
    if query.ndim != 3:
        raise ValueError(f"query has {query.ndim} axes, wanted [T, H, W]")
    tokens, heads, width = query.shape
    for name, selection in zip(("keys", "extra"), selections, strict=False):
        _check_selection(name, selection, tokens, width, query.dtype)
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {sinks.shape}, wanted {(heads,)}")
    if not sm_scale > 0:
        raise ValueError(f"sm_scale is {sm_scale}, wanted a positive number")
    if not 0 < value_width <= width:
        raise ValueError(f"value_width is {value_width}, wanted 1 to {width}, the width of query")


def _check_selection(
    name: str, selection: Selection, tokens: int, width: int, dtype: jnp.dtype
) -> None:
    pool, indices, lengths = selection.pool, selection.indices, selection.lengths
    _check_pool(name, selection, width, dtype)
    rows = pool.shape[0] * selection.stride
    if not 0 < rows < 2**31:
        raise ValueError(f"{name}.pool has {rows} rows, wanted 1 to 2^31 - 1: ids are int32")
    if indices.ndim != 2 or indices.shape[0] != tokens:
        raise ValueError(f"{name}.indices have shape {indices.shape}, wanted [{tokens}, K]")
    if lengths is not None and lengths.shape != (tokens,):
        raise ValueError(f"{name}.lengths have shape {lengths.shape}, wanted {(tokens,)}")
    size = selection.page_size
    if size is not None and not 0 < size <= selection.stride:
        raise ValueError(
            f"{name}.page_size is {size}, wanted 1 to {selection.stride}, the rows of a page"
        )


def _check_pool(name: str, selection: Selection, width: int, dtype: jnp.dtype) -> None:
    pool, layout, size = selection.pool, selection.layout, selection.page_size
    if layout is None:
        if pool.ndim != 3 or pool.shape[2] != width:
            raise ValueError(f"{name}.pool has shape {pool.shape}, wanted [N, R, {width}]")
        if pool.dtype != dtype:
            raise ValueError(
                f"the dtype of {name}.pool is {pool.dtype}, wanted that of query, {dtype}, or uint8"
            )
        return
    if layout.width != width:
        raise ValueError(
            f"{name}.pool of bytes with {pool.ndim} axes has rows of {layout.width} numbers, "
            f"wanted {width}, the width of query"
        )
    if not layout.exponents:
        if pool.ndim != 3 or pool.shape[2] != layout.row_bytes:
            raise ValueError(
                f"{name}.pool of bytes has shape {pool.shape}, wanted [N, R, {layout.row_bytes}]"
            )
    elif size is None or size < 1 or size * layout.row_bytes > pool.shape[1]:
        raise ValueError(
            f"{name}.page_size is {size}, wanted 1 to {pool.shape[1] // layout.row_bytes}, the "
            f"rows of {layout.row_bytes} bytes that a page of {pool.shape[1]} holds"
        )
