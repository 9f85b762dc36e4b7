"""Manifold-constrained hyper-connections (mHC): n residual streams around every sub-layer.

A sub-layer reads a mixture of the streams and its output is written back to all of them, while
the streams themselves are mixed by a doubly stochastic matrix (arXiv 2512.24880). All of it
depends on the token and is computed in fp32; the streams keep the dtype of the model.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import HyperConnection, StreamHead


def spread(config: DeepseekV4Config, hidden: Float[Array, "*B D"]) -> Float[Array, "*B n D"]:
    """The first streams: copies of the embedding."""
    return jnp.repeat(hidden[..., None, :], config.hc_mult, axis=-2)


@flax.struct.dataclass
class Gates:
    """How a sub-layer's output and the streams themselves enter the next streams, fp32.

    ``across`` is doubly stochastic and not symmetric; it is applied transposed.
    """

    write: Float[Array, "*B n"]
    across: Float[Array, "*B n n"]


def read(
    config: DeepseekV4Config, mix: HyperConnection, streams: Float[Array, "*B n D"]
) -> tuple[Float[Array, "*B D"], Gates]:
    """What a sub-layer sees, sum_i pre_i X_i, and how its output is to be written."""
    n = config.hc_mult
    raw = _project(config, mix.fn, streams)
    pre, post, across = jnp.split(raw, [n, 2 * n], axis=-1)
    pre_base, post_base, across_base = jnp.split(mix.base, [n, 2 * n])
    pre = jax.nn.sigmoid(pre * mix.scale[0] + pre_base) + config.hc_eps
    post = 2 * jax.nn.sigmoid(post * mix.scale[1] + post_base)
    logits = (across * mix.scale[2] + across_base).reshape(*raw.shape[:-1], n, n)
    across = sinkhorn(logits, config.hc_sinkhorn_iters, config.hc_eps)
    seen = jnp.einsum("...i,...id->...d", pre, streams.astype(jnp.float32))
    return seen.astype(streams.dtype), Gates(post, across)


def write(
    gates: Gates, streams: Float[Array, "*B n D"], out: Float[Array, "*B D"]
) -> Float[Array, "*B n D"]:
    """X'_k = post_k out + sum_j C_jk X_j."""
    kept = jnp.einsum("...jk,...jd->...kd", gates.across, streams.astype(jnp.float32))
    added = gates.write[..., None] * out[..., None, :].astype(jnp.float32)
    return (added + kept).astype(streams.dtype)


def sinkhorn(logits: Float[Array, "*B n n"], iterations: int, eps: float) -> Float[Array, "*B n n"]:
    """Softmax of the rows, made doubly stochastic by scaling columns and rows in turn."""
    matrix = jax.nn.softmax(logits, axis=-1) + eps
    matrix = matrix / (matrix.sum(axis=-2, keepdims=True) + eps)

    def scale(_: int, matrix: Array) -> Array:
        matrix = matrix / (matrix.sum(axis=-1, keepdims=True) + eps)
        return matrix / (matrix.sum(axis=-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, scale, matrix)


def joined(
    config: DeepseekV4Config, head: StreamHead, streams: Float[Array, "*B n D"]
) -> Float[Array, "*B D"]:
    """The one hidden state that the final norm reads."""
    weight = jax.nn.sigmoid(_project(config, head.fn, streams) * head.scale[0] + head.base)
    weight = weight + config.hc_eps
    joined = jnp.einsum("...i,...id->...d", weight, streams.astype(jnp.float32))
    return joined.astype(streams.dtype)


def mean(streams: Float[Array, "*B n D"]) -> Float[Array, "*B D"]:
    """What a drafter taps after a layer."""
    return streams.astype(jnp.float32).mean(axis=-2).astype(streams.dtype)


def _project(
    config: DeepseekV4Config, fn: Float[Array, "O nD"], streams: Float[Array, "*B n D"]
) -> Float[Array, "*B O"]:
    """``fn`` of the flattened streams over their root mean square."""
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    scale = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + config.rms_norm_eps)
    return jnp.einsum("...i,oi->...o", flat, fn) * scale
