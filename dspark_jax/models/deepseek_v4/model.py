"""DeepSeek-V4 behind the target protocol."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4 import hyper_connections as mhc
from dspark_jax.models.deepseek_v4.attention import attention
from dspark_jax.models.deepseek_v4.batch import locate_rows
from dspark_jax.models.deepseek_v4.cache import (
    DeepseekV4Cache,
    LayerCache,
    init_cache,
    init_pages,
)
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.moe import moe
from dspark_jax.models.deepseek_v4.plan import Plan, make_plan
from dspark_jax.models.deepseek_v4.weights import DeepseekV4Weights, Layer
from dspark_jax.models.layers import linear, rms_norm
from dspark_jax.models.ragged import Mixed, Packed
from dspark_jax.models.taps import check_taps
from pallas_kernels.best_linear import best_linear

__all__ = [
    "BESIDE_PAGES",
    "best_tokens",
    "commit",
    "forward",
    "init_cache",
    "init_pages",
    "input_embedding",
    "output_embedding",
    "unembed",
]

BESIDE_PAGES = "rings of raw rows and of compressor states"


def forward(
    config: DeepseekV4Config,
    weights: DeepseekV4Weights,
    cache: DeepseekV4Cache,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], DeepseekV4Cache]:
    """Run packed rows through the decoder and write their cache rows.

    Args:
        packed: the query rows; their positions must continue what their slots hold. Where a
            slot has more than ``config.verify_rows`` of them, all must be committed. Requests
            with ``slots`` may be pieces of one text.
        taps: layers whose output is wanted: -1 the embedding, i the mean of the residual
            streams after layer i.

    Returns:
        Hidden states after the final norm, the taps side by side in the order asked, and the
        cache with the rows written and ``length`` unchanged. Padding rows hold finite values
        that mean nothing.

    Raises:
        ValueError: a tap outside -1..L-1.
    """
    check_taps(taps, config.num_hidden_layers)
    plan = make_plan(config, cache, locate_rows(packed, cache.length.shape[0]))
    hidden = jnp.take(weights.embed, packed.tokens, axis=0)
    outputs = {-1: hidden} if -1 in taps else {}
    streams = mhc.spread(config, hidden)
    layers = []
    for index, (layer, rows) in enumerate(zip(weights.layers, cache.layers, strict=True)):
        streams, rows = _layer(config, layer, rows, plan, streams)
        layers.append(rows)
        if index in taps:
            outputs[index] = mhc.mean(streams)
    tapped = (
        jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
        if taps
        else jnp.zeros((hidden.shape[0], 0), hidden.dtype)
    )
    joined = mhc.joined(config, weights.stream_head, streams)
    final = rms_norm(joined, weights.norm, config.rms_norm_eps)
    return final, tapped, cache.replace(layers=tuple(layers))


def unembed(
    config: DeepseekV4Config, weights: DeepseekV4Weights, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """fp32 logits of final hidden states."""
    with jax.named_scope("head"):
        return linear(hidden, weights.head, out_dtype=jnp.float32)


def best_tokens(
    config: DeepseekV4Config, weights: DeepseekV4Weights, hidden: Float[Array, "T D"]
) -> Int[Array, "T"]:
    """The most likely token of each row."""
    with jax.named_scope("head"):
        return best_linear(hidden, weights.head)[0]


def commit(
    config: DeepseekV4Config, cache: DeepseekV4Cache, length: Int[Array, "S"]
) -> DeepseekV4Cache:
    """Set the committed length of every slot; rows past it become scratch.

    Nothing has to be undone: ``ring`` and ``entries`` say why.
    """
    return cache.replace(length=length.astype(jnp.int32))


def output_embedding(weights: DeepseekV4Weights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its head."""
    return weights.head


def input_embedding(weights: DeepseekV4Weights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its embedding."""
    return weights.embed


def _layer(
    config: DeepseekV4Config,
    layer: Layer,
    rows: LayerCache,
    plan: Plan,
    streams: Float[Array, "T n D"],
) -> tuple[Float[Array, "T n D"], LayerCache]:
    """Attention, then experts, each between a read of the streams and a write to them."""
    with jax.named_scope("streams"):
        seen, gates = mhc.read(config, layer.attention_mix, streams)
        normed = rms_norm(seen, layer.attention_norm, config.rms_norm_eps)
    attended, rows = attention(config, layer.attention, rows, plan, normed)
    with jax.named_scope("streams"):
        streams = mhc.write(gates, streams, attended)
        seen, gates = mhc.read(config, layer.moe_mix, streams)
        normed = rms_norm(seen, layer.moe_norm, config.rms_norm_eps)
    fed = moe(config, layer.moe, normed, plan.batch.packed.tokens, plan.batch.real)
    with jax.named_scope("streams"):
        return mhc.write(gates, streams, fed), rows
