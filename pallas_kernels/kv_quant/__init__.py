"""Latent cache rows in eight bits, in the byte layouts of DeepSeek's own serving kernels."""

from pallas_kernels.kv_quant.api import Implementation, write
from pallas_kernels.kv_quant.layouts import V3_2, V4, Layout
from pallas_kernels.kv_quant.reference import dequantise, empty_pages, quantise, read

__all__ = [
    "V3_2",
    "V4",
    "Implementation",
    "Layout",
    "dequantise",
    "empty_pages",
    "quantise",
    "read",
    "write",
]
