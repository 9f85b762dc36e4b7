"""DeepSeek-V3.2 behind the target protocol."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v32.attention import attention, position_phases
from dspark_jax.models.deepseek_v32.cache import (
    DeepseekV32Cache,
    LayerCache,
    init_cache,
    init_pages,
)
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.indexer import Phases
from dspark_jax.models.deepseek_v32.moe import feed_forward
from dspark_jax.models.deepseek_v32.places import Places, find_places
from dspark_jax.models.deepseek_v32.weights import DeepseekV32Weights, Layer
from dspark_jax.models.layers import linear, rms_norm
from dspark_jax.models.ragged import Mixed, Packed
from dspark_jax.models.taps import check_taps
from pallas_kernels.best_linear import best_linear

__all__ = [
    "best_tokens",
    "commit",
    "forward",
    "forward_with_margins",
    "init_cache",
    "init_pages",
    "input_embedding",
    "output_embedding",
    "unembed",
]


def forward(
    config: DeepseekV32Config,
    weights: DeepseekV32Weights,
    cache: DeepseekV32Cache,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], DeepseekV32Cache]:
    """Run packed rows through the decoder and write their cache rows.

    Prefill, decoding and the verification of windows are all this; each row chooses the rows it
    attends to by itself, so windows of any widths give what one token at a time gives.

    Args:
        packed: the query rows; their positions must continue what their slots hold.
        taps: layers whose output is wanted: -1 the embedding, i the residual stream after
            layer i, before any norm.

    Returns:
        Hidden states after the final norm, the taps side by side in the order asked, and the
        cache with the rows written and ``length`` unchanged. Padding rows hold finite values
        that mean nothing.

    Raises:
        ValueError: a tap outside -1..L-1.
    """
    hidden, tapped, cache, _ = forward_with_margins(config, weights, cache, packed, taps=taps)
    return hidden, tapped, cache


def forward_with_margins(
    config: DeepseekV32Config,
    weights: DeepseekV32Weights,
    cache: DeepseekV32Cache,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], DeepseekV32Cache, Float[Array, "L T"]]:
    """``forward``, and how clearly each layer chose the rows that each token attends to.

    A margin is the lowest score of a row chosen less the highest of a row left out: +inf where no
    row is left out. Where it is 0 rows tie (one that no index head responds to scores exactly 0),
    and the equations do not say which is taken: implementations differ.

    Raises:
        ValueError: a tap outside -1..L-1.
    """
    check_taps(taps, config.num_hidden_layers)
    places = find_places(cache, packed)
    phases = position_phases(config, packed.position)
    hidden = jnp.take(weights.embed, packed.tokens, axis=0)
    outputs = {-1: hidden} if -1 in taps else {}
    layers, margins = [], []
    for index, (layer, rows) in enumerate(zip(weights.layers, cache.layers, strict=True)):
        hidden, rows, margin = _layer(config, layer, rows, places, phases, hidden)
        layers.append(rows)
        margins.append(margin)
        if index in taps:
            outputs[index] = hidden
    tapped = (
        jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
        if taps
        else jnp.zeros((hidden.shape[0], 0), hidden.dtype)
    )
    final = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return final, tapped, cache.replace(layers=tuple(layers)), jnp.stack(margins)


def unembed(
    config: DeepseekV32Config, weights: DeepseekV32Weights, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """fp32 logits of final hidden states."""
    return linear(hidden, weights.head, out_dtype=jnp.float32)


def best_tokens(
    config: DeepseekV32Config, weights: DeepseekV32Weights, hidden: Float[Array, "T D"]
) -> Int[Array, "T"]:
    """The most likely token of each row."""
    return best_linear(hidden, weights.head)[0]


def commit(
    config: DeepseekV32Config, cache: DeepseekV32Cache, length: Int[Array, "S"]
) -> DeepseekV32Cache:
    """Set the committed length of every slot; rows past it become scratch."""
    return cache.replace(length=length.astype(jnp.int32))


def output_embedding(weights: DeepseekV32Weights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its head."""
    return weights.head


def input_embedding(weights: DeepseekV32Weights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its embedding."""
    return weights.embed


# jitted, so that layers of one kind are traced once
@functools.partial(jax.jit, static_argnums=0)
def _layer(
    config: DeepseekV32Config,
    layer: Layer,
    rows: LayerCache,
    places: Places,
    phases: Phases,
    hidden: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], LayerCache, Float[Array, "T"]]:
    normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
    attended, rows, margin = attention(config, layer.attention, rows, places, phases, normed)
    hidden = hidden + attended
    normed = rms_norm(hidden, layer.ffn_norm, config.rms_norm_eps)
    return hidden + feed_forward(config, layer.ffn, normed, places.position), rows, margin
