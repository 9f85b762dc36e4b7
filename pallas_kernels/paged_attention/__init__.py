"""Attention of decode and verify queries over each request's own cache rows."""

from pallas_kernels.paged_attention.api import Implementation, paged_attention

__all__ = ["Implementation", "paged_attention"]
