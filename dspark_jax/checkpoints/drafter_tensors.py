"""Tensor names of drafter checkpoints, checked strictly, to and from ``DrafterWeights``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.tensors import TensorSource, check_tensors
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import ConfidenceHead, DrafterLayer, DrafterWeights, MarkovHead

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
PREFIX = "model."
# Other spellings of a name that are found in files.
ALIASES = {
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
}


class DrafterTensors:
    """The tensors of a file under their plain names: no ``model.`` prefix, no aliases."""

    def __init__(self, source: TensorSource, where: Path | str) -> None:
        """Resolve names; ``ValueError`` when two tensors of the file claim the same name."""
        self.where = where
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.shapes:
            name = stored.removeprefix(PREFIX)
            name = ALIASES.get(name, name)
            if name in self._stored:
                raise ValueError(
                    f"{where}: tensors {self._stored[name]} and {stored} are two spellings of one"
                )
            self._stored[name] = stored

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by plain name."""
        return {name: self._source.shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype."""
        return self._source.read(self._stored[name])


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a drafter brings itself, in both dialects."""
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    rank = config.markov_rank
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if config.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if config.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def read_weights(
    config: DrafterConfig,
    tensors: DrafterTensors,
    wanted: Mapping[str, tuple[int, ...]],
    dtype: Any | None,
) -> DrafterWeights:
    """Weights on the default device, in ``dtype`` (None: as stored), after the strict check.

    ``wanted`` is everything the file must hold; ``EMBED`` and ``LM_HEAD`` are read when among it.

    Raises:
        ValueError: any missing, unknown or misshapen tensor, all in one message.
    """
    check_tensors(tensors.shapes, wanted, tensors.where)

    def read(*names: str) -> jax.Array:
        parts = [tensors.read(name) for name in names]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return jax.device_put(whole if dtype is None else whole.astype(jnp.dtype(dtype)))

    def read_if_wanted(name: str) -> jax.Array | None:
        return read(name) if name in wanted else None

    def layer(index: int) -> DrafterLayer:
        prefix = f"layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return DrafterLayer(
            input_norm=read(prefix + "input_layernorm.weight"),
            q=read(attention + "q_proj.weight"),
            kv=read(attention + "k_proj.weight", attention + "v_proj.weight"),
            out=read(attention + "o_proj.weight"),
            q_norm=read(attention + "q_norm.weight"),
            k_norm=read(attention + "k_norm.weight"),
            post_norm=read(prefix + "post_attention_layernorm.weight"),
            gate_up=read(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=read(mlp + "down_proj.weight"),
        )

    markov = confidence = None
    if config.markov_rank:
        markov = MarkovHead(
            w1=read("markov_head.markov_w1.weight"),
            w2=read("markov_head.markov_w2.weight"),
            gate=read_if_wanted("markov_head.gate_proj.weight"),
            gate_bias=read_if_wanted("markov_head.gate_proj.bias"),
            joint=read_if_wanted("markov_head.joint_proj.weight"),
            joint_bias=read_if_wanted("markov_head.joint_proj.bias"),
        )
    if config.enable_confidence_head:
        confidence = ConfidenceHead(
            weight=read("confidence_head.proj.weight")[0],
            bias=read("confidence_head.proj.bias")[0],
        )
    return DrafterWeights(
        fc=read("fc.weight"),
        hidden_norm=read("hidden_norm.weight"),
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
        norm=read("norm.weight"),
        markov=markov,
        confidence=confidence,
        embed=read_if_wanted(EMBED),
        lm_head=read_if_wanted(LM_HEAD),
    )


def named_tensors(config: DrafterConfig, weights: DrafterWeights) -> dict[str, np.ndarray]:
    """The inverse of ``read_weights``: every tensor the drafter brings, under its plain name.

    Raises:
        ValueError: weights whose shapes do not fit ``config``.
    """
    kv = config.num_key_value_heads * config.head_dim
    named: dict[str, Any] = {
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        named |= {
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "post_attention_layernorm.weight": layer.post_norm,
            attention + "q_proj.weight": layer.q,
            attention + "k_proj.weight": layer.kv[:kv],
            attention + "v_proj.weight": layer.kv[kv:],
            attention + "o_proj.weight": layer.out,
            attention + "q_norm.weight": layer.q_norm,
            attention + "k_norm.weight": layer.k_norm,
            mlp + "gate_proj.weight": layer.gate_up[: config.intermediate_size],
            mlp + "up_proj.weight": layer.gate_up[config.intermediate_size :],
            mlp + "down_proj.weight": layer.down,
        }
    if weights.markov is not None:
        named |= {
            "markov_head.markov_w1.weight": weights.markov.w1,
            "markov_head.markov_w2.weight": weights.markov.w2,
            "markov_head.gate_proj.weight": weights.markov.gate,
            "markov_head.gate_proj.bias": weights.markov.gate_bias,
            "markov_head.joint_proj.weight": weights.markov.joint,
            "markov_head.joint_proj.bias": weights.markov.joint_bias,
        }
    if weights.confidence is not None:
        named |= {
            "confidence_head.proj.weight": weights.confidence.weight[None],
            "confidence_head.proj.bias": weights.confidence.bias[None],
        }
    arrays = {
        name: np.ascontiguousarray(value) for name, value in named.items() if value is not None
    }
    found = {name: value.shape for name, value in arrays.items()}
    check_tensors(found, drafter_shapes(config), "the drafter's weights")
    return arrays
