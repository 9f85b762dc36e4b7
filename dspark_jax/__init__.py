"""DSpark speculative decoding in JAX: adaptive verification in one jitted call."""

__version__ = "0.1.0"
