"""Rotary position embedding of fresh heads and their way into the key/value cache."""

from pallas_kernels.rope_write.api import Implementation, rope_write

__all__ = ["Implementation", "rope_write"]
