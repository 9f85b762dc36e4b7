"""Operands without an entry: no kernel takes them, because a launch of no programs is an error."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.best_linear import best_linear
from pallas_kernels.block_linear import block_linear
from pallas_kernels.indexer_logits import Batch, indexer_logits
from pallas_kernels.kv_quant import V4, write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ragged_pack import ragged_pack
from pallas_kernels.rope_write import rope_write
from pallas_kernels.row_linear import linear_add, rms_linear
from pallas_kernels.sparse_mla import Selection, sparse_mla
from pallas_kernels.swa_index import swa_index
from pallas_kernels.top_b import top_b
from pallas_kernels.top_k import top_k


def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def fp32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def of_best_linear(T=32, D=64, V=256, R=64):
    return best_linear, (numbers(T, D), numbers(V, D), (numbers(T, R), numbers(V, R)))


def of_block_linear(R=32, D=64, B=2, S=16, X=2, V=128):
    return block_linear, (numbers(R, D), ids(B, S), numbers(X, V, D), ids(B))


def of_indexer_logits(T=6, J=16, D=64, M=4, P=16, A=2, W=3, C=2):
    batch = Batch(ids(A, W), ids(A, C), ids(T))
    return indexer_logits, (numbers(T, J, D), fp32(T, J), numbers(M, P, D), batch)


def of_kv_quant(N=3, T=2):
    operands = jax.ShapeDtypeStruct((N, 2400), jnp.uint8), ids(T), numbers(T, V4.width)
    return functools.partial(write, layout=V4, page_size=4), operands


def of_paged_attention(A=2, W=4, H=4, E=64, N=1, P=64, B=2):
    caches = numbers(B, N, P, E), numbers(B, N, P, E)
    return paged_attention, (numbers(A, W, H, E), *caches, ids(A, W), ids(A))


def of_packed_attention(A=2, W=4, S=3, C=2, T=9):
    caches = numbers(4, 1, 64, 64), numbers(4, 1, 64, 64)

    def attend(query, keys, values, position, slots, table, rows, **options):
        return paged_attention(query, keys, values, position, slots, table, rows=rows, **options)

    return attend, (numbers(T, 4, 64), *caches, ids(A, W), ids(A), ids(S, C), ids(A, W))


def of_ragged_pack(S=4, W=8):
    return functools.partial(ragged_pack, size=16), (ids(S, W), ids(S), ids(S))


def of_rope_write(T=4, N=1, E=32, S=2, K=8):
    caches = numbers(S, N, K, E), numbers(S, N, K, E)
    operands = numbers(T, (2 + 2 * N) * E), fp32(T, E // 2), fp32(T, E // 2), *caches
    return rope_write, (*operands, ids(T), ids(T))


def of_rms_linear(T=4, D=64, V=64):
    return functools.partial(rms_linear, eps=1e-5), (numbers(T, D), numbers(D), numbers(V, D))


def of_linear_add(T=4, D=64, V=64):
    return linear_add, (numbers(T, D), numbers(V, D), numbers(T, V))


def of_sparse_mla(T=2, H=64, N=4, R=16):
    def attend(query, pool, indices, **options):
        return sparse_mla(query, Selection(pool, indices), sm_scale=1.0, **options)

    return attend, (numbers(T, H, 512), numbers(N, R, 512), ids(T, 64))


def of_swa_index(T=4, A=2):
    return functools.partial(swa_index, window=8, length=16), (ids(T), ids(T), ids(A), ids(A))


def of_top_b(S=4, G=7):
    return top_b, (fp32(S, G), jax.ShapeDtypeStruct((S, G), bool), ids())


def of_top_k(T=4, K=512):
    return functools.partial(top_k, count=8), (fp32(T, K), ids(T))


KINDS = {
    "triton": (
        of_block_linear,
        of_indexer_logits,
        of_kv_quant,
        of_ragged_pack,
        of_rope_write,
        of_rms_linear,
        of_linear_add,
        of_swa_index,
        of_top_b,
        of_top_k,
    ),
    "mosaic": (of_best_linear, of_paged_attention, of_packed_attention, of_sparse_mla),
}


@pytest.mark.parametrize(
    ("kind", "make", "axis"),
    [
        pytest.param(kind, make, axis, id=f"{make.__name__[3:]}-{axis}")
        for kind, makers in KINDS.items()
        for make in makers
        for axis in inspect.signature(make).parameters
    ],
)
def test_a_kernel_refuses_an_axis_of_no_entries(monkeypatch, kind, make, axis):
    hopper = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(
        "pallas_kernels.hopper.jax", types.SimpleNamespace(devices=lambda: [hopper])
    )
    operation, operands = make(**{axis: 0})
    with pytest.raises((NotImplementedError, ValueError), match=r"empty|\b0\b"):
        jax.eval_shape(functools.partial(operation, implementation=kind), *operands)


def test_a_batch_of_no_rows_writes_nothing():
    operation, operands = of_rope_write(T=0)
    query, keys, values = operation(*(jnp.ones(x.shape, x.dtype) for x in operands))
    assert query.shape == (0, 2, 32)
    assert (keys == 1).all()
    assert (values == 1).all()


def test_no_requests_have_no_scores():
    operation, operands = of_indexer_logits(A=0)
    scores = operation(*jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), operands))
    assert scores.shape == (6, 32)
