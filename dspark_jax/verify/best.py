"""The most likely token of every row."""

from __future__ import annotations

from pallas_kernels.best_linear.reference import best_token

__all__ = ["best_token"]
