"""Latent cache rows in eight bits, in the byte layouts of DeepSeek's own serving kernels."""

from pallas_kernels.kv_quant.layouts import V3_2, V4, Layout
from pallas_kernels.kv_quant.reference import dequantise, empty_pages, quantise, read, write

__all__ = ["V3_2", "V4", "Layout", "dequantise", "empty_pages", "quantise", "read", "write"]
