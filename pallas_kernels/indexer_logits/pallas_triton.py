"""Indexer scores on the tensor cores, a request's keys read once for all its tokens.

A program owns a tile of the keys of one request and keeps it while it goes through the request's
tokens, or a share of them where they are many: a prompt would leave most of the GPU idle. Keys are
the rows of the product and heads its columns, so that the weighted sum over heads stays within a
thread but for its last two steps: with heads as rows it would cross all lanes and warps and cost as
much as the product. Pallas' Triton lowering is deprecated in JAX; the body could move to jax_triton
as it is.
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
from jaxtyping import Array, Float

from pallas_kernels.choice import empty
from pallas_kernels.indexer_logits.operands import Batch

HEADS = (16, 32, 64, 128)
WIDTHS = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is cut.

    Attributes:
        keys: keys of a program; a power of two of at least 64.
        warps: warps of a program.
        stages: tokens whose queries are on their way at once.
        tokens: most tokens of a program.
    """

    keys: int = 256
    warps: int = 8
    stages: int = 2
    tokens: int = 64


DEFAULT = Tuning()


def unsupported(
    query: jax.Array | jax.ShapeDtypeStruct, keys: jax.Array | jax.ShapeDtypeStruct, batch: Batch
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("query", query), ("keys", keys)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    _, heads, width = query.shape
    for name, value, known in (("heads J", heads, HEADS), ("key width I", width, WIDTHS)):
        if value not in known:
            return f"{name} is {value}, wanted one of {', '.join(map(str, known))}"
    return empty(query=query, keys=keys, row=batch.row, pages=batch.pages)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def indexer_logits(
    query: Float[Array, "T J I"],
    weight: Float[Array, "T J"],
    keys: Float[Array, "M P I"],
    batch: Batch,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "T K"]:
    """The operation of `reference.indexer_logits` for operands that `unsupported` passes.

    A program whose tokens see none of its keys computes nothing. Jitted, so that a model of many
    layers traces and lowers it once.
    """
    tokens, heads, width = query.shape
    pages, page_size, _ = keys.shape
    requests, columns = batch.pages.shape
    total = columns * page_size
    shares = pl.cdiv(batch.row.shape[1], tuning.tokens)
    shown = jnp.take(batch.seen, batch.row, mode="fill", fill_value=0)
    shown = jnp.pad(shown, ((0, 0), (0, shares * tuning.tokens - shown.shape[1])))
    shown = shown.reshape(requests, shares, tuning.tokens).max(axis=2)

    def kernel(
        query_ref: Any,
        weight_ref: Any,
        keys_ref: Any,
        pages_ref: Any,
        row_ref: Any,
        count_ref: Any,
        shown_ref: Any,
        out_ref: Any,
    ) -> None:
        request, share = pl.program_id(1), pl.program_id(2)
        start, first = pl.program_id(0) * tuning.keys, share * tuning.tokens

        @pl.when(start < shown_ref[request, share])
        def _() -> None:
            at = start + jnp.arange(tuning.keys)
            inside = at < total
            column = at // page_size
            page = plt.load(
                pages_ref.at[jnp.full(at.shape, request), column], mask=inside, other=-1
            )
            known = (page >= 0) & (page < pages)
            shape = (tuning.keys, width)
            along = jnp.broadcast_to(jnp.arange(width)[None], shape)
            tile = plt.load(
                keys_ref.at[
                    jnp.broadcast_to(jnp.where(known, page, 0)[:, None], shape),
                    jnp.broadcast_to((at - column * page_size)[:, None], shape),
                    along,
                ],
                mask=jnp.broadcast_to(known[:, None], shape),
                other=0.0,
            )

            def token(index: jax.Array, _: None) -> None:
                row = row_ref[request, first + index]
                head = jnp.arange(heads)
                shape = (heads, width)
                queries = plt.load(
                    query_ref.at[
                        jnp.full(shape, row),
                        jnp.broadcast_to(head[:, None], shape),
                        jnp.broadcast_to(jnp.arange(width)[None], shape),
                    ]
                )
                weights = plt.load(weight_ref.at[jnp.full(head.shape, row), head])
                product = lax.dot_general(
                    tile, queries, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
                score = (jnp.maximum(product, 0.0) * weights[None]).sum(axis=1)
                plt.store(out_ref.at[jnp.full(at.shape, row), at], score, mask=inside)

            lax.fori_loop(0, jnp.minimum(count_ref[request] - first, tuning.tokens), token, None)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((tokens, total), jnp.float32),
        grid=(pl.cdiv(total, tuning.keys), requests, shares),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="indexer_logits",
    )(query, weight.astype(jnp.float32), keys, batch.pages, batch.row, batch.count(), shown)
