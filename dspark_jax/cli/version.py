"""`dspark version`: what is installed."""

from __future__ import annotations

import importlib.metadata

import dspark_jax


def version() -> None:
    """Print the versions of dspark-jax and JAX."""
    print(f"dspark-jax {dspark_jax.__version__}, jax {importlib.metadata.version('jax')}")
