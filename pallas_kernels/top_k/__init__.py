"""The entries of highest score of each row, as an indexer chooses them."""

from pallas_kernels.top_k.api import Implementation, top_k

__all__ = ["Implementation", "top_k"]
