"""Hugging Face configs and tensors of dense targets (Llama family, Qwen3)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.field_kinds import check_kinds
from dspark_jax.checkpoints.tensors import TensorSource, check_tensors
from dspark_jax.models.config import DenseConfig, RopeScaling
from dspark_jax.models.weights import DenseLayer, DenseWeights

MODEL_TYPES = ("llama", "qwen3")
# Read by modules of their own.
SPARSE_MODEL_TYPES = ("deepseek_v32", "deepseek_v4")
DTYPES = ("float32", "bfloat16")
# Buffers of older Llama checkpoints: recomputed from the config, never weights.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def dense_config(raw: Mapping[str, Any], where: Path | str) -> DenseConfig:
    """The contents of a ``config.json`` as a DenseConfig.

    Reads ``rope_parameters`` (transformers 5) and ``rope_theta`` / ``rope_scaling`` (before).

    Raises:
        ValueError: a model type or a feature that is not supported, or fields that are missing,
            of the wrong kind or out of range; ``where`` says whose.
    """
    check_kinds(raw, where)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported; supported: "
            + ", ".join((*MODEL_TYPES, *SPARSE_MODEL_TYPES))
        )
    _refuse_unsupported(raw, where)
    names = [
        field.name
        for field in dataclasses.fields(DenseConfig)
        if field.type == "int" and field.name not in ("head_dim", "num_key_value_heads")
    ]
    missing = [name for name in (*names, "rms_norm_eps") if raw.get(name) is None]
    if model_type == "qwen3" and raw.get("head_dim") is None:
        missing.append("head_dim")
    if missing:
        raise ValueError(f"{where}: config lacks {', '.join(missing)}")
    theta, scaling = rope_settings(raw, where)
    heads, head_dim = raw["num_attention_heads"], raw.get("head_dim")
    if head_dim is None:
        head_dim = raw["hidden_size"] // max(heads, 1)
    kv_heads = raw.get("num_key_value_heads")
    config = DenseConfig(
        model_type=model_type,
        **{name: raw[name] for name in names},
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        qk_norm=model_type == "qwen3",
    )
    check_dense(config, where)
    return config


def check_dense(config: DenseConfig, where: Path | str) -> None:
    """Refuse sizes and constants of a dense decoder that no model has.

    Raises:
        ValueError: the first one out of range, or head counts that do not divide.
    """
    counts = [field.name for field in dataclasses.fields(config) if field.type == "int"]
    check_positive(config, counts, where)
    check_heads(config, where)


def check_heads(config: Any, where: Path | str) -> None:
    """Refuse heads that cannot share keys, or whose numbers cannot be rotated in pairs.

    Raises:
        ValueError: the first field that does not fit.
    """
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{where}: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"{where}: head_dim is {config.head_dim}; wanted an even number")


def check_positive(config: Any, counts: Sequence[str], where: Path | str) -> None:
    """Refuse sizes below 1 and constants that are no finite number above 0, of a config as read.

    Raises:
        ValueError: the first field of ``counts`` or field of type float out of range.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in counts and value < 1:
            raise ValueError(f"{where}: {field.name} is {value}; wanted at least 1")
        if field.type == "float" and not 0 < value < math.inf:
            raise ValueError(f"{where}: {field.name} is {value}; wanted a finite number above 0")


def rope_settings(raw: Mapping[str, Any], where: Path | str) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling of a config, in either spelling.

    Raises:
        ValueError: a rope type other than "default" and "llama3", a partial rotation, or numbers
            of a scaling that are missing or out of range.
    """
    spelled = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    stored = (spelled.get("rope_theta"), raw.get("rope_theta"), 10_000.0)
    theta = float(next(value for value in stored if value is not None))
    kind = spelled.get("rope_type") or spelled.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"{where}: rope_type {kind!r} is not supported; supported: default, llama3"
        )
    partial = spelled.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor is {partial}, wanted 1.0")
    if kind == "default":
        return theta, None
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if spelled.get(name) is None]
    if missing:
        raise ValueError(f"{where}: llama3 rope scaling lacks {', '.join(missing)}")
    scaling = RopeScaling(**{name: spelled[name] for name in names})
    check_positive(scaling, ("original_max_position_embeddings",), where)
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(
            f"{where}: high_freq_factor is {scaling.high_freq_factor}; wanted more than "
            f"low_freq_factor, {scaling.low_freq_factor}"
        )
    return theta, scaling


def dense_shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a Hugging Face checkpoint of this config holds."""
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def dense_weights(
    config: DenseConfig, source: TensorSource, dtype: Any, where: Path | str, layers: bool = True
) -> DenseWeights:
    """Weights of a dense target in ``dtype`` (float32 or bfloat16) on the default device.

    Without ``layers`` only embedding, final norm and head are read. A stored head beside a tied
    embedding is accepted when it is the same matrix.

    Raises:
        ValueError: another dtype; or any missing, unknown or misshapen tensor, all in one message.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype {dtype.name} is not supported; supported: {', '.join(DTYPES)}")
    wanted = dense_shapes(config)
    found = {name: shape for name, shape in source.shapes.items() if not IGNORED.fullmatch(name)}
    if config.tie_word_embeddings and "lm_head.weight" in found:
        if not np.array_equal(
            source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
        ):
            raise ValueError(
                f"{where}: tie_word_embeddings is true, but lm_head.weight differs from "
                "model.embed_tokens.weight; set it to false to use both"
            )
        del found["lm_head.weight"]
    check_tensors(found, wanted, where)

    def read(*names: str) -> jax.Array:
        parts = [source.read(f"{name}.weight").astype(dtype) for name in names]
        return jax.device_put(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def layer(index: int) -> DenseLayer:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return DenseLayer(
            input_norm=read(prefix + "input_layernorm"),
            qkv=read(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            out=read(attention + "o_proj"),
            post_norm=read(prefix + "post_attention_layernorm"),
            gate_up=read(mlp + "gate_proj", mlp + "up_proj"),
            down=read(mlp + "down_proj"),
            q_norm=read(attention + "q_norm") if config.qk_norm else None,
            k_norm=read(attention + "k_norm") if config.qk_norm else None,
        )

    return DenseWeights(
        embed=read("model.embed_tokens"),
        layers=tuple(layer(index) for index in range(config.num_hidden_layers if layers else 0)),
        norm=read("model.norm"),
        lm_head=None if config.tie_word_embeddings else read("lm_head"),
    )


def _refuse_unsupported(raw: Mapping[str, Any], where: Path | str) -> None:
    """Name the first feature of a config that this decoder would silently get wrong."""
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ValueError(f"{where}: {name} is {raw[name]!r}, wanted false")
    # Qwen3 configs carry a window that is only switched on by use_sliding_window.
    windowed = raw.get("use_sliding_window", raw.get("sliding_window") is not None)
    if windowed and raw.get("sliding_window") is not None:
        raise ValueError(
            f"{where}: sliding_window is {raw['sliding_window']!r}, wanted none: "
            "only full attention is supported"
        )
    kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ValueError(f"{where}: layer_types hold {', '.join(kinds)}, wanted full_attention")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act is {raw['hidden_act']!r}, wanted 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ValueError(f"{where}: quantization {method!r} is not supported, wanted plain weights")
