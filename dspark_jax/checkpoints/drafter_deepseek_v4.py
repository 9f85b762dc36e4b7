"""The drafter of a DeepSeek-V4 checkpoint: ``dspark_*`` fields and ``mtp.*`` tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoints.deepseek_v4 import (
    DRAFTER,
    Shapes,
    Tensors,
    layer_shapes,
    read_layer,
    read_stream_head,
    stream_head_shapes,
)
from dspark_jax.checkpoints.deepseek_v4_config import deepseek_v4_config
from dspark_jax.checkpoints.deepseek_v4_named import (
    deepseek_v4_fields,
    named_layer,
    named_mixture,
)
from dspark_jax.checkpoints.quantized import STORED_DTYPES
from dspark_jax.checkpoints.tensors import SafetensorsSource, check_tensors
from dspark_jax.drafter.deepseek_v4.config import STORED, DeepseekV4DrafterConfig
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights

_TAPS = STORED["target_layer_ids"]
_FIELDS = {name: stored for name, stored in STORED.items() if stored != _TAPS}


def deepseek_v4_drafter_config(
    raw: Mapping[str, Any], where: Path | str
) -> DeepseekV4DrafterConfig:
    """The drafter that a ``config.json`` describes beside its target.

    Raises:
        ValueError: fields missing or of the wrong kind; stages that compress; anything that the
            target's config is refused for.
    """
    if raw.get("model_type") != "deepseek_v4":
        raise ValueError(
            f"{where}: a drafter with dspark_* fields and model_type {raw.get('model_type')!r} is "
            "not supported; supported: deepseek_v4"
        )
    missing = [name for name in (*_FIELDS.values(), _TAPS) if raw.get(name) is None]
    if missing:
        raise ValueError(f"{where}: config lacks {', '.join(missing)}")
    for name in _FIELDS.values():
        if type(raw[name]) is not int:
            raise ValueError(f"{where}: {name} is {raw[name]!r}; wanted a whole number")
    taps = raw[_TAPS]
    if not isinstance(taps, list) or any(type(layer) is not int for layer in taps):
        raise ValueError(f"{where}: {_TAPS} is {taps!r}; wanted a list of whole numbers")
    target = deepseek_v4_config(raw, where)
    stages = (raw.get("compress_ratios") or [])[target.num_hidden_layers :]
    if any(stages):
        raise ValueError(
            f"{where}: compress_ratios of the drafter's stages are {list(stages)}, wanted zeros: "
            "they attend to a window alone"
        )
    return DeepseekV4DrafterConfig(
        target=target,
        target_layer_ids=tuple(taps),
        **{name: raw[stored] for name, stored in _FIELDS.items()},
    )


def deepseek_v4_drafter_weights(
    config: DeepseekV4DrafterConfig, directory: Path, dtype: Any
) -> DeepseekV4DrafterWeights:
    """The ``mtp.*`` tensors of a checkpoint in ``dtype``; the rest of it is the target's.

    Raises:
        ValueError: another dtype than float32 and bfloat16, or any missing, unknown or misshapen
            tensor, all in one message.
    """
    source = SafetensorsSource(directory, STORED_DTYPES)
    tensors = Tensors(
        source,
        drafter_shapes(config),
        dtype,
        directory,
        lambda name: DRAFTER.fullmatch(name) is None,
    )
    last = f"mtp.{config.stages - 1}."
    return DeepseekV4DrafterWeights(
        main_proj=tensors.matrix("mtp.0.main_proj"),
        main_norm=tensors.matrix("mtp.0.main_norm"),
        stages=tuple(
            read_layer(config.target, tensors, f"mtp.{index}.", 0, hashed=False)
            for index in range(config.stages)
        ),
        stream_head=read_stream_head(tensors, last),
        norm=tensors.matrix(f"{last}norm"),
        markov_w1=tensors.matrix(f"{last}markov_head.markov_w1"),
        markov_w2=tensors.matrix(f"{last}markov_head.markov_w2"),
        confidence=tensors.exact(f"{last}confidence_head.proj.weight")[0],
    )


def deepseek_v4_drafter_fields(config: DeepseekV4DrafterConfig) -> dict[str, Any]:
    """The inverse of ``deepseek_v4_drafter_config``: the target's fields and the drafter's."""
    return {
        **deepseek_v4_fields(config.target),
        "compress_ratios": [*config.target.compress_ratios, *[0] * config.stages],
        _TAPS: list(config.target_layer_ids),
        **{stored: getattr(config, name) for name, stored in _FIELDS.items()},
    }


def deepseek_v4_drafter_tensors(
    config: DeepseekV4DrafterConfig, weights: DeepseekV4DrafterWeights
) -> dict[str, np.ndarray]:
    """The inverse of ``deepseek_v4_drafter_weights``: the ``mtp.*`` tensors, in their dtypes.

    Raises:
        ValueError: weights that do not fit ``config``.
    """
    last = f"mtp.{config.stages - 1}."
    named = {
        "mtp.0.main_proj.weight": weights.main_proj,
        "mtp.0.main_norm.weight": weights.main_norm,
        f"{last}norm.weight": weights.norm,
        f"{last}markov_head.markov_w1.weight": weights.markov_w1,
        f"{last}markov_head.markov_w2.weight": weights.markov_w2,
        f"{last}confidence_head.proj.weight": weights.confidence[None],
        **named_mixture(f"{last}hc_head", weights.stream_head),
    }
    for index, stage in enumerate(weights.stages):
        named |= named_layer(f"mtp.{index}.", stage)
    arrays = {name: np.ascontiguousarray(value) for name, value in named.items()}
    found = {name: value.shape for name, value in arrays.items()}
    check_tensors(found, drafter_shapes(config), "the drafter's weights")
    return arrays


def drafter_shapes(config: DeepseekV4DrafterConfig) -> Shapes:
    """Name and shape, before quantisation, of every tensor of the drafter."""
    target, last = config.target, f"mtp.{config.stages - 1}."
    hidden, table = target.hidden_size, (target.vocab_size, config.markov_rank)
    shapes: Shapes = {
        "mtp.0.main_proj.weight": (hidden, config.stages * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}norm.weight": (hidden,),
        f"{last}markov_head.markov_w1.weight": table,
        f"{last}markov_head.markov_w2.weight": table,
        f"{last}confidence_head.proj.weight": (1, hidden + config.markov_rank),
        **stream_head_shapes(target, last),
    }
    for index in range(config.stages):
        shapes |= layer_shapes(target, f"mtp.{index}.", 0, hashed=False)
    return shapes
