"""The block drafter: backbone, sequential heads, confidence head."""

from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.validate import DrafterMismatch, check_block_size, check_fits
from dspark_jax.drafter.weights import ConfidenceHead, ContextCache, DrafterWeights, MarkovHead

__all__ = [
    "ConfidenceHead",
    "ContextCache",
    "DrafterConfig",
    "DrafterMismatch",
    "DrafterWeights",
    "MarkovHead",
    "check_block_size",
    "check_fits",
]
