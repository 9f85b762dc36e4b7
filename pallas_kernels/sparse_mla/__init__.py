"""Attention of packed query tokens over listed rows of latent caches (MLA, one key/value head)."""

from pallas_kernels.sparse_mla.api import Implementation, sparse_mla
from pallas_kernels.sparse_mla.selection import Selection

__all__ = ["Implementation", "Selection", "sparse_mla"]
