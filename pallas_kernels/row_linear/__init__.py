"""Products of a few rows with a matrix, together with what surrounds them in a decoder layer."""

from pallas_kernels.row_linear.api import Implementation, linear_add, rms_linear

__all__ = ["Implementation", "linear_add", "rms_linear"]
