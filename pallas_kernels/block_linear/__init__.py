"""Products of blocks of rows, each with a matrix of its own: experts on the tokens sent to them."""

from pallas_kernels.block_linear.api import AUTOMATIC, Implementation, block_linear, obstacle
from pallas_kernels.block_linear.pallas_triton import SIZES

LEAST_SIZE = SIZES[0]
"""Rows of a block that the kernel takes at least."""

__all__ = ["AUTOMATIC", "LEAST_SIZE", "Implementation", "block_linear", "obstacle"]
