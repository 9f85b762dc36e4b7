"""The two spellings of a DeepSeek-V4 ``config.json``: DeepSeek's own and transformers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.field_kinds import check_kinds
from dspark_jax.checkpoints.target import check_positive
from dspark_jax.checkpoints.yarn_fields import yarn_of
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.deepseek_v4.cache import PAGE_TOKENS
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config

_KINDS = {
    "sliding_attention": None,
    "compressed_sparse_attention": "compressed_sparse_attention",
    "heavily_compressed_attention": "heavily_compressed_attention",
}
# What another value of these would change is not implemented.
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def deepseek_v4_config(raw: Mapping[str, Any], where: Path | str) -> DeepseekV4Config:
    """The contents of a ``config.json`` as a ``DeepseekV4Config``.

    Layers past ``num_hidden_layers`` in ``compress_ratios`` are those of a drafter.

    Raises:
        ValueError: fields missing, of the wrong kind or contradicting, or a feature that is
            not supported; ``where`` says whose.
    """
    check_kinds(raw, where)
    for name, wanted in _FIXED.items():
        if raw.get(name) is not None and raw[name] != wanted:
            raise ValueError(f"{where}: {name} is {raw[name]!r}, wanted {wanted!r}")
    ints = [field.name for field in dataclasses.fields(DeepseekV4Config) if field.type == "int"]
    ints.remove("num_hash_layers")
    floats = ["routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps"]
    missing = [name for name in (*ints, *floats) if raw.get(name) is None]
    if missing:
        raise ValueError(f"{where}: config lacks {', '.join(missing)}")
    theta, compress_theta, yarn = _rope(raw, where)
    sizes: dict[str, Any] = {name: raw[name] for name in (*ints, *floats)}
    config = DeepseekV4Config(
        **sizes,
        compress_ratios=_ratios(raw, where),
        num_hash_layers=_hash_layers(raw, where),
        rope_theta=theta,
        compress_rope_theta=compress_theta,
        compress_yarn=yarn,
    )
    check_positive(config, ints, where)
    _check_shapes(config, where)
    return config


def _ratios(raw: Mapping[str, Any], where: Path | str) -> tuple[int, ...]:
    """Compression ratio of every decoder layer."""
    layers = raw["num_hidden_layers"]
    name, ratios = "compress_ratios", raw.get("compress_ratios")
    if ratios is None:
        name, ratios = "layer_types with compress_rates", _ratios_of_kinds(raw, where)
    if len(ratios) < layers:
        raise ValueError(
            f"{where}: {name} names {len(ratios)} layers, num_hidden_layers is {layers}"
        )
    for ratio in ratios[:layers]:
        if ratio and (ratio < 2 or PAGE_TOKENS % ratio):
            raise ValueError(
                f"{where}: {name} contains {ratio}; wanted 0 or a divisor of {PAGE_TOKENS}"
            )
    return tuple(ratios[:layers])


def _ratios_of_kinds(raw: Mapping[str, Any], where: Path | str) -> list[int]:
    """The same from ``layer_types`` and ``compress_rates``."""
    rates, kinds = raw.get("compress_rates") or {}, raw.get("layer_types")
    if kinds is None:
        raise ValueError(f"{where}: config lacks compress_ratios (or layer_types)")
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown:
        raise ValueError(
            f"{where}: layer_types hold {', '.join(unknown)}; wanted {', '.join(_KINDS)}"
        )
    lacking = sorted({kind for kind in kinds if _KINDS[kind] and kind not in rates})
    if lacking:
        raise ValueError(f"{where}: compress_rates lacks {', '.join(lacking)}")
    for kind in rates:
        overlaps = kind == "compressed_sparse_attention"
        if kind in kinds and (rates[kind] == OVERLAPPING_RATIO) != overlaps:
            wanted = OVERLAPPING_RATIO if overlaps else f"anything but {OVERLAPPING_RATIO}"
            raise ValueError(f"{where}: the rate of {kind} is {rates[kind]}, wanted {wanted}")
    return [rates[kind] if _KINDS[kind] else 0 for kind in kinds]


def _hash_layers(raw: Mapping[str, Any], where: Path | str) -> int:
    """How many layers, counted from the first, route by token id."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        count = raw.get("num_hash_layers")
        if count is None:
            raise ValueError(f"{where}: config lacks num_hash_layers (or mlp_layer_types)")
        return count
    count = sum(kind == "hash_moe" for kind in kinds)
    wanted = ["hash_moe"] * count + ["moe"] * (len(kinds) - count)
    if list(kinds) != wanted or len(kinds) != raw["num_hidden_layers"]:
        raise ValueError(
            f"{where}: mlp_layer_types is {kinds!r}; wanted one for each of "
            f"num_hidden_layers, {raw['num_hidden_layers']}: first hash_moe, then moe"
        )
    return count


def _rope(raw: Mapping[str, Any], where: Path | str) -> tuple[float, float, Yarn | None]:
    """Base of window layers, base of compressed layers, and the rescaling of the latter."""
    nested: Mapping[str, Any] = raw.get("rope_parameters") or {}
    main: Mapping[str, Any] = nested.get("main") or {}
    compress: Mapping[str, Any] = nested.get("compress") or {}
    scaling: Mapping[str, Any] = compress or raw.get("rope_scaling") or {}
    theta: Any = main.get("rope_theta", raw.get("rope_theta"))
    compress_theta: Any = compress.get("rope_theta", raw.get("compress_rope_theta"))
    for name, value in (("rope_theta", theta), ("compress_rope_theta", compress_theta)):
        if value is None:
            raise ValueError(f"{where}: {name} is None; wanted a number")
    if (main.get("rope_type") or "default") != "default":
        raise ValueError(f"{where}: rope_type of main is {main['rope_type']!r}, wanted 'default'")
    return float(theta), float(compress_theta), yarn_of(scaling, where)


def _check_shapes(config: DeepseekV4Config, where: Path | str) -> None:
    """Refuse sizes that contradict each other."""
    rope = config.qk_rope_head_dim
    if rope % 2 or not 0 < rope <= min(config.head_dim, config.index_head_dim):
        raise ValueError(
            f"{where}: qk_rope_head_dim is {rope}; wanted an even number up to head_dim "
            f"{config.head_dim} and index_head_dim {config.index_head_dim}"
        )
    if not 0 <= config.num_hash_layers <= config.num_hidden_layers:
        raise ValueError(
            f"{where}: num_hash_layers is {config.num_hash_layers}; wanted 0 to "
            f"{config.num_hidden_layers}, num_hidden_layers"
        )
    if config.num_attention_heads % config.o_groups:
        raise ValueError(
            f"{where}: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"o_groups {config.o_groups}"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ValueError(
            f"{where}: num_experts_per_tok is {config.num_experts_per_tok}, n_routed_experts is "
            f"{config.n_routed_experts}"
        )
