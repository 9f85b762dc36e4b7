"""Which drafted tokens of a batch are verified: the budget's worth of highest survival."""

from pallas_kernels.top_b.api import Implementation, top_b

__all__ = ["Implementation", "top_b"]
