"""Tensors of a DeepSeek-V3.2 checkpoint, under DeepSeek's names or transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.quantized import FP8, SCALE, read_plain, stored_shapes
from dspark_jax.checkpoints.target import DTYPES
from dspark_jax.checkpoints.tensors import READABLE_DTYPES, SafetensorsSource, check_tensors
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.weights import (
    Attention,
    DeepseekV32Weights,
    Indexer,
    Layer,
    Mlp,
    Moe,
)
from dspark_jax.models.experts import Experts

STORED = (*READABLE_DTYPES, FP8, SCALE)
"""Dtypes of safetensors that a DeepSeek-V3.2 checkpoint may hold."""

_HUGGING_FACE = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "scale": "weight_scale_inv",
}


def hugging_face_name(name: str) -> str:
    """The name in transformers' layout of a tensor that DeepSeek's code calls ``name``."""
    if name.endswith(".gate.bias"):
        name = name.removesuffix("bias") + "e_score_correction_bias"
    before, indexer, after = name.partition(".indexer.")
    parts = [_HUGGING_FACE.get(part, part) for part in before.split(".")]
    # inside the indexer both layouts use one name, except for scales
    after = re.sub(r"\.scale$", ".weight_scale_inv", after)
    return ".".join(parts) + indexer + after


def target_shapes(config: DeepseekV32Config) -> dict[str, tuple[int, ...]]:
    """Shape, before quantisation, of every tensor of the decoder, by DeepSeek's names."""
    hidden, latent = config.hidden_size, config.kv_lora_rank
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    index, query = config.index_head_dim, config.q_lora_rank
    layer = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn.wq_a.weight": (query, hidden),
        "attn.q_norm.weight": (query,),
        "attn.wq_b.weight": (heads * (config.qk_nope_head_dim + rope), query),
        "attn.wkv_a.weight": (latent + rope, hidden),
        "attn.kv_norm.weight": (latent,),
        "attn.wkv_b.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        "attn.wo.weight": (hidden, heads * config.v_head_dim),
        "attn.indexer.wq_b.weight": (config.index_n_heads * index, query),
        "attn.indexer.wk.weight": (index, hidden),
        "attn.indexer.k_norm.weight": (index,),
        "attn.indexer.k_norm.bias": (index,),
        "attn.indexer.weights_proj.weight": (config.index_n_heads, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "head.weight": (config.vocab_size, hidden),
    }
    for number in range(config.num_hidden_layers):
        here = dict(layer)
        if number < config.first_k_dense_replace:
            here |= _mlp_shapes("ffn.", hidden, config.intermediate_size)
        else:
            width = config.moe_intermediate_size
            here["ffn.gate.weight"] = (config.n_routed_experts, hidden)
            here["ffn.gate.bias"] = (config.n_routed_experts,)
            here |= _mlp_shapes("ffn.shared_experts.", hidden, config.n_shared_experts * width)
            for expert in range(config.n_routed_experts):
                here |= _mlp_shapes(f"ffn.experts.{expert}.", hidden, width)
        shapes |= {f"layers.{number}.{name}": shape for name, shape in here.items()}
    return shapes


def deepseek_v32_weights(
    config: DeepseekV32Config,
    source: SafetensorsSource,
    dtype: Any,
    where: Path | str,
    layers: bool = True,
) -> DeepseekV32Weights:
    """Weights of a DeepSeek-V3.2 target in ``dtype`` (float32 or bfloat16).

    Matrices in fp8 with block scales are dequantised. Router and indexer head weights stay fp32.
    Without ``layers`` the decoder layers are checked and not read. Layers of a multi-token head
    behind the decoder's (``num_nextn_predict_layers``) are ignored.

    Raises:
        ValueError: another dtype; any missing, unknown or misshapen tensor, all in one message;
            or a tensor stored in a dtype that it must not have.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype {dtype.name} is not supported; supported: {', '.join(DTYPES)}")
    reader = _Reader(_checked(config, source, where), dtype)
    return DeepseekV32Weights(
        embed=reader.matrix("embed"),
        layers=tuple(
            _layer(config, reader, number)
            for number in range(config.num_hidden_layers if layers else 0)
        ),
        norm=reader.matrix("norm"),
        head=reader.matrix("head"),
    )


class _Reader:
    """Tensors by DeepSeek's names, dequantised and in ``dtype``."""

    def __init__(self, source: SafetensorsSource, dtype: jnp.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def matrix(self, *names: str) -> jax.Array:
        """``x.weight`` of every name, one below the other."""
        return jax.device_put(self._stacked(*names))

    def exact(self, name: str) -> jax.Array:
        """A tensor in fp32, whatever the dtype of the rest."""
        return jax.device_put(read_plain(self._source, name).astype(np.float32))

    def mlp(self, prefix: str) -> Mlp:
        """A SwiGLU MLP."""
        return Mlp(
            gate_up=self.matrix(f"{prefix}w1", f"{prefix}w3"), down=self.matrix(f"{prefix}w2")
        )

    def experts(self, prefix: str, count: int) -> Experts:
        """All routed experts of a layer, each array filled expert by expert."""

        def filled(*parts: str) -> jax.Array:
            whole = None
            for number in range(count):
                one = self._stacked(*(f"{prefix}{number}.{part}" for part in parts))
                if whole is None:
                    whole = np.empty((count, *one.shape), self._dtype)
                whole[number] = one
            return jax.device_put(whole)

        return Experts(gate_up=filled("w1", "w3"), down=filled("w2"))

    def _stacked(self, *names: str) -> np.ndarray:
        parts = [read_plain(self._source, f"{name}.weight").astype(self._dtype) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _layer(config: DeepseekV32Config, reader: _Reader, number: int) -> Layer:
    prefix = f"layers.{number}."
    attention, ffn = f"{prefix}attn.", f"{prefix}ffn."
    indexer = f"{attention}indexer."
    width = config.qk_nope_head_dim + config.v_head_dim
    up = reader.matrix(f"{attention}wkv_b")
    key_up, value_up = jnp.split(
        up.reshape(config.num_attention_heads, width, config.kv_lora_rank),
        [config.qk_nope_head_dim],
        axis=1,
    )
    if number < config.first_k_dense_replace:
        fed: Mlp | Moe = reader.mlp(ffn)
    else:
        fed = Moe(
            router=reader.exact(f"{ffn}gate.weight"),
            bias=reader.exact(f"{ffn}gate.bias"),
            experts=reader.experts(f"{ffn}experts.", config.n_routed_experts),
            shared=reader.mlp(f"{ffn}shared_experts."),
        )
    return Layer(
        attention_norm=reader.matrix(f"{prefix}attn_norm"),
        attention=Attention(
            narrow=reader.matrix(f"{attention}wq_a", f"{attention}wkv_a", f"{indexer}wk"),
            query_norm=reader.matrix(f"{attention}q_norm"),
            latent_norm=reader.matrix(f"{attention}kv_norm"),
            wide=reader.matrix(f"{attention}wq_b", f"{indexer}wq_b"),
            key_up=key_up,
            value_up=value_up,
            out=reader.matrix(f"{attention}wo"),
            indexer=Indexer(
                key_norm=reader.exact(f"{indexer}k_norm.weight"),
                key_bias=reader.exact(f"{indexer}k_norm.bias"),
                head_weight=reader.exact(f"{indexer}weights_proj.weight"),
            ),
        ),
        ffn_norm=reader.matrix(f"{prefix}ffn_norm"),
        ffn=fed,
    )


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}w1.weight": (width, hidden),
        f"{prefix}w2.weight": (hidden, width),
        f"{prefix}w3.weight": (width, hidden),
    }


def _checked(
    config: DeepseekV32Config, source: SafetensorsSource, where: Path | str
) -> SafetensorsSource:
    """The tensors of the decoder by DeepSeek's names, after every check; errors use the file's."""
    transformers = any(name.startswith("model.") for name in source.shapes)

    def spelled(name: str) -> str:
        return hugging_face_name(name) if transformers else name

    plain = target_shapes(config)
    dtypes = {name: source.dtypes.get(spelled(name), "") for name in plain}
    wanted = stored_shapes(plain, dtypes)
    count = config.num_hidden_layers
    ignored = tuple(
        spelled(f"layers.{count + extra}.") for extra in range(config.num_nextn_predict_layers)
    )
    found = {name: shape for name, shape in source.shapes.items() if not name.startswith(ignored)}
    check_tensors(found, {spelled(name): shape for name, shape in wanted.items()}, where)
    _check_dtypes({name: source.dtypes[spelled(name)] for name in wanted}, plain, where, spelled)
    return source.renamed({name: spelled(name) for name in wanted})


def _check_dtypes(
    dtypes: Mapping[str, str], plain: Mapping[str, tuple[int, ...]], where: Path | str, spelled: Any
) -> None:
    """Only matrices may be fp8, only their scales exponents."""
    faults = []
    for name, dtype in dtypes.items():
        if name not in plain:
            allowed: tuple[str, ...] = ("F32", SCALE)
        elif len(plain[name]) == 2:
            allowed = (*READABLE_DTYPES, FP8)
        else:
            allowed = READABLE_DTYPES
        if dtype not in allowed:
            faults.append(f"{spelled(name)} is {dtype}, wanted {' or '.join(allowed)}")
    if faults:
        raise ValueError(f"{where} holds tensors of wrong dtypes: {', '.join(faults)}")
