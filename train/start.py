"""Where a run begins: new weights, or those of a drafter that exists."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from train.run_folder import flat

Trainable = Literal["drafter", "confidence_head"]

ADDED = ("enable_confidence_head", "confidence_head_with_markov")
"""What a drafter may lack that a run adds to it."""
COPIES = ("embed", "lm_head")
"""Matrices of a target that some drafters bring copies of."""


def existing_weights(source: str, drafter: Any, target: LoadedTarget) -> Any:
    """fp32 weights of the drafter at ``source``; its confidence head is None when it has none.

    Raises:
        ValueError: it is not the drafter that the run describes.
    """
    loaded = load_drafter(
        source,
        (target.config, target.weights),
        jnp.float32,
        stop_token_ids=target.stop_token_ids,
    )
    kinds = type(loaded.config).__name__, type(drafter).__name__
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the drafter {source} has a {kinds[0]}, the run describes a {kinds[1]}: describe it "
            "in the section of its family, or start from another one"
        )
    found, wanted = (flat(dataclasses.asdict(config)) for config in (loaded.config, drafter))
    for name in wanted:
        if found.get(name) == wanted[name] or (name in ADDED and loaded.weights.confidence is None):
            continue
        raise ValueError(
            f"the drafter {source} has {name} = {found.get(name)!r}, the run describes "
            f"{wanted[name]!r}: change the section that describes it, or start from another one"
        )
    return loaded.weights


def with_confidence(weights: Any, new: Any) -> Any:
    """``weights`` with the confidence head of ``new`` where they lack one that ``new`` has."""
    if weights.confidence is not None or new.confidence is None:
        return weights
    return dataclasses.replace(weights, confidence=new.confidence)


def hold_still(weights: Any, trainable: Trainable) -> Any:
    """``weights`` with gradients only where the run trains; own embedding and head never learn."""
    still: Any = jax.lax.stop_gradient(weights)
    if trainable == "confidence_head":
        return dataclasses.replace(still, confidence=weights.confidence)
    copies = {name: getattr(still, name) for name in COPIES if hasattr(still, name)}
    return dataclasses.replace(weights, **copies)
