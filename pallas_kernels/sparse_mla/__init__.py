"""Attention of packed query tokens over listed rows of latent caches (MLA, one key/value head)."""

from pallas_kernels.sparse_mla.api import Implementation, sparse_mla
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.together import pair_tokens

__all__ = ["Implementation", "Selection", "pair_tokens", "sparse_mla"]
