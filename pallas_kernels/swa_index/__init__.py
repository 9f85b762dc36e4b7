"""Cache rows of every token's sliding window, in rings of recent rows."""

from pallas_kernels.swa_index.api import Implementation, swa_index

__all__ = ["Implementation", "swa_index"]
