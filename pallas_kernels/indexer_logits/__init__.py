"""Scores of the lightning indexer: every query token against the keys of its request."""

from pallas_kernels.indexer_logits.api import Implementation, indexer_logits
from pallas_kernels.indexer_logits.operands import Batch

__all__ = ["Batch", "Implementation", "indexer_logits"]
