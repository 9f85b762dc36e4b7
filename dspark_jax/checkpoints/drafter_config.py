"""Drafter configs of DeepSpec and of speculators, read into one ``DrafterConfig``.

Three spellings exist: DeepSpec's flat ``config.json``, the same with the drafter's own fields
nested under ``dflash_config``, and speculators' with the layers nested under
``transformer_layer_config`` and layer ids one higher. DeepSeek's ``dspark_*`` describes another
kind of drafter (``drafter_deepseek_v4``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.checkpoints.field_kinds import check_kinds
from dspark_jax.checkpoints.target import check_heads, check_positive, rope_settings
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.validate import DrafterMismatch, check_config

Dialect = Literal["deepspec", "speculators"]

DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
LAYER_TYPES_OF_MODEL = ("qwen3",)
# Speculators' layer id i is the input of target layer i; here it is the output of layer i - 1.
SPECULATORS_LAYER_OFFSET = 1

_TAPS = {"deepspec": "target_layer_ids", "speculators": "aux_hidden_state_layer_ids"}
_INT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "markov_rank",
)
# The others may be 0, or have faults of their own in ``check_config``.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_target_layers",
    "target_hidden_size",
)


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a drafter and not a target (or, DeepSeek's, both)."""
    marks = {"target_layer_ids", "dflash_config", "speculators_config", "speculators_model_type"}
    return any(name in marks for name in raw)


def is_deepseek(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a DeepSeek target with its drafter beside it."""
    return any(name.startswith("dspark_") for name in raw)


def dialect_of(raw: Mapping[str, Any], where: Path | str) -> Dialect:
    """Which dialect a ``config.json`` is written in.

    Raises:
        ValueError: DeepSeek's dialect, whose drafters are of another kind; no drafter at all; or a
            field of the wrong kind.
    """
    check_kinds(raw, where)
    if is_deepseek(raw):
        raise ValueError(
            f"{where} is a DeepSeek checkpoint with DSpark layers (dspark_* fields, mtp.* "
            "tensors), wanted the config of a drafter alone; load_drafter reads both"
        )
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    if "target_layer_ids" in _merged(raw, where):
        return "deepspec"
    raise ValueError(
        f"{where} is not the config of a drafter: it has neither target_layer_ids (deepspec) nor "
        f"speculators_config (speculators); its model_type is {raw.get('model_type')!r}"
    )


def drafter_config(
    raw: Mapping[str, Any], where: Path | str, target: Any | None = None
) -> DrafterConfig:
    """The contents of a drafter's ``config.json`` as a ``DrafterConfig``.

    Args:
        raw: the parsed file.
        where: named in errors.
        target: config of the target. Only DeepSpec's dialect stores the number of target
            layers, the others need it from here.

    Raises:
        ValueError: fields missing or contradicting, or a feature that is not supported.
    """
    dialect = dialect_of(raw, where)
    fields = _merged(raw, where)
    if dialect == "speculators":
        fields = _from_speculators(fields, where)
    _refuse_unsupported(fields, dialect, where)
    if fields.get("num_target_layers") is None and target is not None:
        fields["num_target_layers"] = target.num_hidden_layers
    missing = [name for name in _INT_FIELDS if fields.get(name) is None]
    if fields.get("rms_norm_eps") is None:
        missing.append("rms_norm_eps")
    if fields.get("target_layer_ids") is None:
        missing.append(_TAPS[dialect])
    if missing:
        raise ValueError(f"{where}: config lacks {', '.join(missing)}")
    theta, scaling = rope_settings(fields, where)
    config = DrafterConfig(
        **{name: fields[name] for name in _INT_FIELDS},
        draft_vocab_size=_or(fields.get("draft_vocab_size"), fields["vocab_size"]),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(fields["rms_norm_eps"]),
        target_layer_ids=tuple(fields["target_layer_ids"]),
        target_hidden_size=_or(fields.get("target_hidden_size"), fields["hidden_size"]),
        markov_head_type=_or(fields.get("markov_head_type"), "vanilla"),
        enable_confidence_head=bool(fields.get("enable_confidence_head")),
        confidence_head_with_markov=bool(fields.get("confidence_head_with_markov")),
        sliding_window=_sliding_window(fields, where),
    )
    check_positive(config, _SIZES, where)
    check_heads(config, where)
    try:
        check_config(config)
    except DrafterMismatch as error:
        raise DrafterMismatch(f"{where}: {error}") from error
    return config


def reserved_ids(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """End-of-text and padding ids a drafter's config mentions, by role."""
    fields = {**(raw.get("transformer_layer_config") or {}), **raw}
    found = {}
    for role in ("eos", "pad"):
        value = fields.get(f"{role}_token_id")
        if value is not None:
            found[role] = tuple(value) if isinstance(value, list) else (value,)
    return found


def layer_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The Qwen3 fields of a drafter's layers, as Hugging Face spells them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(config.rope_scaling)}
    windowed = config.sliding_window is not None
    kind = "sliding_attention" if windowed else "full_attention"
    return {
        "model_type": "qwen3",
        "dtype": dtype,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [kind] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": windowed,
        "vocab_size": config.vocab_size,
    }


def head_fields(config: DrafterConfig) -> dict[str, Any]:
    """The fields of block and heads that both dialects spell alike."""
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def _merged(raw: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """The flat fields; those nested under ``dflash_config`` count as if they stood outside."""
    nested = raw.get("dflash_config") or {}
    for name, value in nested.items():
        if raw.get(name) is not None and raw[name] != value:
            raise ValueError(
                f"{where}: {name} is {raw[name]!r}, but {value!r} under dflash_config; "
                "remove one of them"
            )
    return {**raw, **nested}


def _from_speculators(fields: dict[str, Any], where: Path | str) -> dict[str, Any]:
    """Speculators' nesting undone and its layer ids turned into DeepSpec's."""
    layers = fields.get("transformer_layer_config")
    if not layers:
        raise ValueError(f"{where}: config lacks transformer_layer_config")
    own = {name: value for name, value in fields.items() if value is not None}
    flat = {**layers, **own, "model_type": layers.get("model_type")}
    ids = fields.get("aux_hidden_state_layer_ids")
    if ids == []:
        raise ValueError(
            f"{where}: aux_hidden_state_layer_ids is empty; at least one tap is needed"
        )
    if ids is not None:
        flat["target_layer_ids"] = [layer - SPECULATORS_LAYER_OFFSET for layer in ids]
    if not flat.get("sample_from_anchor", True):
        raise ValueError(
            f"{where}: sample_from_anchor is false, wanted true: blocks whose anchor slot "
            "predicts nothing are not supported"
        )
    return flat


def _refuse_unsupported(fields: Mapping[str, Any], dialect: Dialect, where: Path | str) -> None:
    """Name the first feature of a config that this drafter would silently get wrong."""
    if fields.get("model_type") not in LAYER_TYPES_OF_MODEL:
        layers = "transformer_layer_config" if dialect == "speculators" else "the draft layers"
        raise ValueError(
            f"{where}: model_type of {layers} is {fields.get('model_type')!r}; "
            f"supported: {', '.join(LAYER_TYPES_OF_MODEL)}"
        )
    if dialect == "deepspec":
        unknown = set(fields.get("architectures") or ()) - set(DEEPSPEC_ARCHITECTURES)
        if unknown:
            raise ValueError(
                f"{where}: architectures hold {', '.join(sorted(unknown))}; supported: "
                f"{', '.join(DEEPSPEC_ARCHITECTURES)}"
            )
    if fields.get("attention_bias"):
        raise ValueError(f"{where}: attention_bias is true, wanted false")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act is {fields['hidden_act']!r}, wanted 'silu'")
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method")
        raise ValueError(f"{where}: quantization {method!r} is not supported, wanted plain weights")


def _sliding_window(fields: Mapping[str, Any], where: Path | str) -> int | None:
    """Context rows a block sees, None for all of them."""
    kinds = set(fields.get("layer_types") or ())
    if not kinds:
        in_use = fields.get("use_sliding_window", True) and fields.get("sliding_window") is not None
        kinds = {"sliding_attention" if in_use else "full_attention"}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ValueError(
            f"{where}: layer_types hold {', '.join(sorted(kinds))}; wanted all full_attention or "
            "all sliding_attention"
        )
    if not fields.get("sliding_window_non_causal", True):
        raise ValueError(
            f"{where}: sliding_window is {fields.get('sliding_window')} with "
            "sliding_window_non_causal false, which makes blocks causal; wanted true or no window"
        )
    if fields.get("sliding_window") is None:
        raise ValueError(
            f"{where}: layer_types are sliding_attention but sliding_window is missing"
        )
    return fields["sliding_window"]


def _or(value: Any, default: Any) -> Any:
    """``value``, or what stands for one that is absent or null."""
    return default if value is None else value
