"""Kernels under `jax.vmap` that have a batched form from Pallas: not one entry after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_linear.pallas_triton import block_linear
from pallas_kernels.indexer_logits import Batch
from pallas_kernels.indexer_logits.pallas_triton import indexer_logits
from pallas_kernels.kv_quant import V4
from pallas_kernels.kv_quant.pallas_triton import write
from pallas_kernels.sparse_mla import Selection
from pallas_kernels.sparse_mla.mosaic_gpu import sparse_mla
from pallas_kernels.swa_index.pallas_triton import swa_index
from pallas_kernels.top_k.pallas_triton import top_k

ENTRIES = 2


def numbers(*shape):
    values = np.random.default_rng(0).standard_normal((ENTRIES, *shape), np.float32)
    return jnp.asarray(values, jnp.bfloat16)


def ids(below, *shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, below, (ENTRIES, *shape)), jnp.int32)


CASES = {
    "block_linear": (
        block_linear,
        (numbers(20, 64), ids(20, 3, 16), numbers(2, 128, 64), ids(2, 3)),
    ),
    "indexer_logits": (
        indexer_logits,
        (
            numbers(4, 16, 32),
            numbers(4, 16).astype(jnp.float32),
            numbers(5, 8, 32),
            Batch(jnp.asarray([[[0, 1], [2, 4]]] * 2), ids(5, 2, 3), jnp.full((2, 4), 24)),
        ),
    ),
    "kv_quant.write": (
        functools.partial(write, layout=V4, page_size=4),
        (jnp.zeros((ENTRIES, 3, 2400), jnp.uint8), jnp.asarray([[1, 9], [4, 0]]), numbers(2, 512)),
    ),
    "swa_index": (
        functools.partial(swa_index, window=5, length=8),
        (ids(20, 4), ids(3, 4), ids(4, 3), ids(8, 3)),
    ),
    "top_k": (
        functools.partial(top_k, count=4),
        (numbers(3, 40).astype(jnp.float32), ids(40, 3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_entries_of_a_batch_are_what_they_are_alone(name):
    kernel, operands = CASES[name]
    run = functools.partial(kernel, interpret=True)
    mapped = jax.vmap(run)(*operands)
    for entry in range(ENTRIES):
        alone = run(*jax.tree.map(lambda x, entry=entry: x[entry], operands))
        for batch, one in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(batch[entry], one)


def test_sparse_attention_lowers_when_it_is_mapped(lowered_for_hopper):
    shapes = (
        ((3, 2, 64, 512), jnp.bfloat16),
        ((3, 4, 16, 512), jnp.bfloat16),
        ((3, 2, 64), jnp.int32),
    )

    def attend(query, pool, indices):
        return sparse_mla(query, (Selection(pool, indices),), None, 1.0)

    text = lowered_for_hopper(jax.vmap(attend), *(jax.ShapeDtypeStruct(*x) for x in shapes))
    assert text.count("mosaic_gpu_v2") == 1
    assert "stablehlo.while" not in text
