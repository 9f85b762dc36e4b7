"""DSpark speculative decoding in JAX: adaptive verification in one jitted call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_jax.checkpoints.drafter import load_drafter as load_drafter
    from dspark_jax.checkpoints.drafter import save_drafter as save_drafter
    from dspark_jax.checkpoints.resolve import load_target as load_target
    from dspark_jax.decode.request import Completion as Completion
    from dspark_jax.decode.request import Request as Request
    from dspark_jax.decode.request import SamplingParams as SamplingParams
    from dspark_jax.decode.session import Generator as Generator
    from dspark_jax.engine.config import EngineConfig as EngineConfig
    from dspark_jax.engine.engine import Engine as Engine

__version__ = "0.1.0"

# Loaded on first use: the command line answers --help without importing JAX.
_PUBLIC = {
    "Completion": "dspark_jax.decode.request",
    "Engine": "dspark_jax.engine.engine",
    "EngineConfig": "dspark_jax.engine.config",
    "Generator": "dspark_jax.decode.session",
    "Request": "dspark_jax.decode.request",
    "SamplingParams": "dspark_jax.decode.request",
    "load_drafter": "dspark_jax.checkpoints.drafter",
    "load_target": "dspark_jax.checkpoints.resolve",
    "save_drafter": "dspark_jax.checkpoints.drafter",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
