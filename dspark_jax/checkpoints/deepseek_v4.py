"""Tensors of a DeepSeek-V4 checkpoint, under DeepSeek's names or transformers'."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.quantized import (
    FP4,
    FP8,
    SCALE,
    read_plain,
    stored_shapes,
)
from dspark_jax.checkpoints.target import DTYPES
from dspark_jax.checkpoints.tensors import READABLE_DTYPES, SafetensorsSource, check_tensors
from dspark_jax.models.deepseek_v4.cache import channels
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import (
    Attention,
    Compressor,
    DeepseekV4Weights,
    HyperConnection,
    Indexer,
    Layer,
    Moe,
    StreamHead,
)
from dspark_jax.models.experts import Experts

Shapes = dict[str, tuple[int, ...]]

DRAFTER = re.compile(r"mtp\.\d+\..*")
"""Layers of the drafter in the same file (or of the plain MTP head that it replaces)."""

_RENAMED = (
    (re.compile(r"model\.embed_tokens\."), "embed."),
    (re.compile(r"model\.hc_head\.hc_"), "hc_head_"),
    (re.compile(r"model\."), ""),
    (re.compile(r"(layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
)


def target_shapes(config: DeepseekV4Config) -> Shapes:
    """Name and shape, before quantisation, of every tensor of the decoder, by DeepSeek's names."""
    shapes: Shapes = {
        "embed.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
        "head.weight": (config.vocab_size, config.hidden_size),
        **stream_head_shapes(config, ""),
    }
    for index, ratio in enumerate(config.compress_ratios):
        shapes |= layer_shapes(
            config, f"layers.{index}.", ratio, hashed=index < config.num_hash_layers
        )
    return shapes


def stream_head_shapes(config: DeepseekV4Config, prefix: str) -> Shapes:
    """What joins the residual streams."""
    n = config.hc_mult
    return {
        f"{prefix}hc_head_fn": (n, n * config.hidden_size),
        f"{prefix}hc_head_base": (n,),
        f"{prefix}hc_head_scale": (1,),
    }


def layer_shapes(config: DeepseekV4Config, prefix: str, ratio: int, *, hashed: bool) -> Shapes:
    """One decoder layer (or drafter stage)."""
    hidden, n = config.hidden_size, config.hc_mult
    heads = config.num_attention_heads * config.head_dim
    low = config.o_groups * config.o_lora_rank
    shapes: Shapes = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    for part in ("attn", "ffn"):
        shapes |= {
            f"hc_{part}_fn": ((2 + n) * n, n * hidden),
            f"hc_{part}_base": ((2 + n) * n,),
            f"hc_{part}_scale": (3,),
        }
    shapes |= {
        "attn.wq_a.weight": (config.q_lora_rank, hidden),
        "attn.q_norm.weight": (config.q_lora_rank,),
        "attn.wq_b.weight": (heads, config.q_lora_rank),
        "attn.wkv.weight": (config.head_dim, hidden),
        "attn.kv_norm.weight": (config.head_dim,),
        "attn.attn_sink": (config.num_attention_heads,),
        "attn.wo_a.weight": (low, heads // config.o_groups),
        "attn.wo_b.weight": (hidden, low),
    }
    if ratio:
        shapes |= _compressor_shapes("attn.compressor.", ratio, config.head_dim, hidden)
    if ratio == OVERLAPPING_RATIO:
        index = config.index_n_heads * config.index_head_dim
        shapes |= {
            "attn.indexer.wq_b.weight": (index, config.q_lora_rank),
            "attn.indexer.weights_proj.weight": (config.index_n_heads, hidden),
            **_compressor_shapes("attn.indexer.compressor.", ratio, config.index_head_dim, hidden),
        }
    shapes["ffn.gate.weight"] = (config.n_routed_experts, hidden)
    if hashed:
        shapes["ffn.gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["ffn.gate.bias"] = (config.n_routed_experts,)
    experts = [f"experts.{index}" for index in range(config.n_routed_experts)]
    for expert in (*experts, "shared_experts"):
        shapes |= {
            f"ffn.{expert}.w1.weight": (config.moe_intermediate_size, hidden),
            f"ffn.{expert}.w2.weight": (hidden, config.moe_intermediate_size),
            f"ffn.{expert}.w3.weight": (config.moe_intermediate_size, hidden),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


def _compressor_shapes(prefix: str, ratio: int, width: int, hidden: int) -> Shapes:
    count = channels(ratio, width)
    return {
        f"{prefix}wkv.weight": (count, hidden),
        f"{prefix}wgate.weight": (count, hidden),
        f"{prefix}ape": (ratio, count),
        f"{prefix}norm.weight": (width,),
    }


class Tensors:
    """Checked tensors of a checkpoint by DeepSeek's names, dequantised and in ``dtype``."""

    def __init__(
        self,
        source: SafetensorsSource,
        wanted: Mapping[str, tuple[int, ...]],
        dtype: Any,
        where: Path | str,
        ignored: Callable[[str], bool],
    ) -> None:
        """Check names, shapes and dtypes of everything that is not ``ignored``.

        Raises:
            ValueError: another dtype than float32 and bfloat16; any missing, unknown or
                misshapen tensor, all in one message; a tensor stored in a dtype that it must
                not have; a tensor that is there under two names.
        """
        self.dtype = jnp.dtype(dtype)
        if self.dtype.name not in DTYPES:
            raise ValueError(
                f"dtype {self.dtype.name} is not supported; supported: {', '.join(DTYPES)}"
            )
        self._where = where
        self._source = _renamed(source, where)
        found = {name: shape for name, shape in self._source.shapes.items() if not ignored(name)}
        check_tensors(found, stored_shapes(wanted, self._source.dtypes), where)
        _check_dtypes(found, wanted, self._source.dtypes, where)

    def matrix(self, *names: str) -> jax.Array:
        """``x.weight`` of every name, one below the other."""
        parts = [self._plain(f"{name}.weight").astype(self.dtype) for name in names]
        return jax.device_put(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def exact(self, name: str) -> jax.Array:
        """A tensor in fp32, whatever the dtype of the rest."""
        return jax.device_put(self._plain(name).astype(np.float32))

    def table(self, name: str, limit: int) -> jax.Array:
        """A table of whole numbers from 0 to ``limit - 1``.

        Raises:
            ValueError: it holds another number.
        """
        numbers = self._plain(name)
        wrong = numbers[(numbers < 0) | (numbers >= limit)]
        if wrong.size:
            raise ValueError(f"{self._where}: {name} holds {wrong[0]}; wanted 0 to {limit - 1}")
        return jax.device_put(numbers.astype(np.int32))

    def experts(self, prefix: str, count: int) -> Experts:
        """All routed experts of a layer, each array filled expert by expert."""

        def expert(index: int, *parts: str) -> np.ndarray:
            rows = [self._plain(f"{prefix}{index}.{part}.weight") for part in parts]
            return np.concatenate(rows).astype(self.dtype)

        def stacked(*parts: str) -> jax.Array:
            first = expert(0, *parts)
            whole = np.empty((count, *first.shape), self.dtype)
            whole[0] = first
            for index in range(1, count):
                whole[index] = expert(index, *parts)
            return jax.device_put(whole)

        return Experts(gate_up=stacked("w1", "w3"), down=stacked("w2"))

    def _plain(self, name: str) -> np.ndarray:
        return read_plain(self._source, name)


def deepseek_v4_weights(
    config: DeepseekV4Config,
    source: SafetensorsSource,
    dtype: Any,
    where: Path | str,
    layers: bool = True,
) -> DeepseekV4Weights:
    """Weights of a DeepSeek-V4 target in ``dtype`` (float32 or bfloat16) on the default device.

    Without ``layers`` the decoder layers are checked and not read. Tensors of a drafter in the
    same file (``mtp.*``) are left to ``load_drafter``.

    Raises:
        ValueError: as ``Tensors``.
    """
    tensors = Tensors(
        source,
        target_shapes(config),
        dtype,
        where,
        lambda name: DRAFTER.fullmatch(name) is not None,
    )
    read = range(config.num_hidden_layers if layers else 0)
    return DeepseekV4Weights(
        embed=tensors.matrix("embed"),
        layers=tuple(
            read_layer(
                config,
                tensors,
                f"layers.{index}.",
                config.compress_ratios[index],
                hashed=index < config.num_hash_layers,
            )
            for index in read
        ),
        stream_head=read_stream_head(tensors, ""),
        norm=tensors.matrix("norm"),
        head=tensors.matrix("head"),
    )


def read_layer(
    config: DeepseekV4Config, tensors: Tensors, prefix: str, ratio: int, *, hashed: bool
) -> Layer:
    """One decoder layer (or drafter stage)."""
    return Layer(
        attention_mix=_hyper_connection(tensors, f"{prefix}hc_attn"),
        attention_norm=tensors.matrix(f"{prefix}attn_norm"),
        attention=_attention(tensors, f"{prefix}attn.", ratio),
        moe_mix=_hyper_connection(tensors, f"{prefix}hc_ffn"),
        moe_norm=tensors.matrix(f"{prefix}ffn_norm"),
        moe=_moe(config, tensors, f"{prefix}ffn.", hashed),
    )


def read_stream_head(tensors: Tensors, prefix: str) -> StreamHead:
    """What joins the residual streams."""
    return StreamHead(
        fn=tensors.exact(f"{prefix}hc_head_fn"),
        base=tensors.exact(f"{prefix}hc_head_base"),
        scale=tensors.exact(f"{prefix}hc_head_scale"),
    )


def _hyper_connection(tensors: Tensors, prefix: str) -> HyperConnection:
    return HyperConnection(
        fn=tensors.exact(f"{prefix}_fn"),
        base=tensors.exact(f"{prefix}_base"),
        scale=tensors.exact(f"{prefix}_scale"),
    )


def _attention(tensors: Tensors, prefix: str, ratio: int) -> Attention:
    indexer = None
    if ratio == OVERLAPPING_RATIO:
        indexer = Indexer(
            query=tensors.matrix(f"{prefix}indexer.wq_b"),
            head_weight=tensors.matrix(f"{prefix}indexer.weights_proj"),
            compressor=_compressor(tensors, f"{prefix}indexer.compressor."),
        )
    return Attention(
        query_a=tensors.matrix(f"{prefix}wq_a"),
        query_norm=tensors.matrix(f"{prefix}q_norm"),
        query_b=tensors.matrix(f"{prefix}wq_b"),
        kv=tensors.matrix(f"{prefix}wkv"),
        kv_norm=tensors.matrix(f"{prefix}kv_norm"),
        sink=tensors.exact(f"{prefix}attn_sink"),
        out_a=tensors.matrix(f"{prefix}wo_a"),
        out_b=tensors.matrix(f"{prefix}wo_b"),
        compressor=_compressor(tensors, f"{prefix}compressor.") if ratio else None,
        indexer=indexer,
    )


def _compressor(tensors: Tensors, prefix: str) -> Compressor:
    return Compressor(
        kv=tensors.exact(f"{prefix}wkv.weight"),
        gate=tensors.exact(f"{prefix}wgate.weight"),
        ape=tensors.exact(f"{prefix}ape"),
        norm=tensors.matrix(f"{prefix}norm"),
    )


def _moe(config: DeepseekV4Config, tensors: Tensors, prefix: str, hashed: bool) -> Moe:
    return Moe(
        router=tensors.exact(f"{prefix}gate.weight"),
        bias=None if hashed else tensors.exact(f"{prefix}gate.bias"),
        expert_of_token=tensors.table(f"{prefix}gate.tid2eid", config.n_routed_experts)
        if hashed
        else None,
        experts=tensors.experts(f"{prefix}experts.", config.n_routed_experts),
        shared_gate_up=tensors.matrix(f"{prefix}shared_experts.w1", f"{prefix}shared_experts.w3"),
        shared_down=tensors.matrix(f"{prefix}shared_experts.w2"),
    )


def _check_dtypes(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    where: Path | str,
) -> None:
    """Only matrices may be quantised, only scales are exponents, only tables are integers."""
    faults = []
    for name in found:
        if name not in wanted:
            allowed = (SCALE, "F32")
        elif name.endswith(".tid2eid"):
            allowed = ("I64", "I32")
        elif len(wanted[name]) == 2 and name.endswith(".weight"):
            allowed = (*READABLE_DTYPES, FP8, FP4)
        else:
            allowed = READABLE_DTYPES
        if dtypes[name] not in allowed:
            faults.append(f"{name} is {dtypes[name]}, wanted {' or '.join(allowed)}")
    if faults:
        raise ValueError(f"{where} holds tensors of other dtypes: {', '.join(faults)}")


def _renamed(source: SafetensorsSource, where: Path | str) -> SafetensorsSource:
    """The tensors under DeepSeek's names."""
    names: dict[str, str] = {}
    for stored in source.shapes:
        name = stored
        for pattern, replacement in _RENAMED:
            name = re.sub(rf"\A{pattern.pattern}", replacement, name)
        if name in names:
            raise ValueError(f"{where} holds {name} twice: as {names[name]} and as {stored}")
        names[name] = stored
    return source.renamed(names)
