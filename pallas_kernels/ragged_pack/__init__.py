"""Rows of many requests' windows, packed one request after another."""

from pallas_kernels.ragged_pack.api import Implementation, ragged_pack

__all__ = ["Implementation", "ragged_pack"]
