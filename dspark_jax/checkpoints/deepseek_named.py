"""Feed-forward tensors under the names that all of DeepSeek's checkpoints give them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dspark_jax.models.experts import Experts

Tensors = dict[str, Any]


def named_mlp(prefix: str, gate_up: Any, down: Any) -> Tensors:
    """A SwiGLU MLP as w1 (gate), w2 (down) and w3 (up)."""
    gate, up = jnp.split(gate_up, 2)
    return {f"{prefix}w1.weight": gate, f"{prefix}w2.weight": down, f"{prefix}w3.weight": up}


def named_experts(prefix: str, experts: Experts) -> Tensors:
    """Every routed expert of a layer."""
    named: Tensors = {}
    for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        named |= named_mlp(f"{prefix}{number}.", gate_up, down)
    return named
