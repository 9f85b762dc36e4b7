"""Block-scaled matrices of DeepSeek's checkpoints, turned into plain numbers.

A matrix ``x.weight`` with a ``x.scale`` beside it is stored in one of two ways:

- fp8: e4m3 numbers, one scale for every block of 128 x 128;
- fp4: two e2m1 numbers a byte, the even column in the low half, one scale for every 32 columns
  of a row.

Scales are powers of two (ue8m0). Both products are exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int8

from dspark_jax.checkpoints.tensors import READABLE_DTYPES, SafetensorsSource

FP8_BLOCK = 128
FP4_BLOCK = 32
FP8, FP4, SCALE = "F8_E4M3", "I8", "F8_E8M0"
STORED_DTYPES = (*READABLE_DTYPES, FP8, FP4, SCALE, "I64", "I32")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored_shapes(
    wanted: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """What a checkpoint must hold for the tensors ``wanted``, scales included.

    Whether a matrix is quantised is decided by the dtype it is stored in.
    """
    shapes = {}
    for name, shape in wanted.items():
        shapes[name] = shape
        dtype = dtypes.get(name)
        if len(shape) != 2 or dtype not in (FP8, FP4) or not name.endswith(".weight"):
            continue
        rows, columns = shape
        if dtype == FP8:
            shapes[scale_of(name)] = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        else:
            shapes[name] = (rows, -(-columns // 2))
            shapes[scale_of(name)] = (rows, -(-columns // FP4_BLOCK))
    return shapes


def read_plain(source: SafetensorsSource, name: str) -> np.ndarray:
    """A tensor as it is stored, or as fp32 where it is quantised."""
    stored = source.read(name)
    dtype = source.dtypes[name]
    if dtype == FP8:
        return dequantize_fp8(stored, source.read(scale_of(name)))
    if dtype == FP4:
        return dequantize_fp4(stored, source.read(scale_of(name)))
    return stored


def dequantize_fp8(
    stored: Float[np.ndarray, "O I"], scale: Float[np.ndarray, "Ob Ib"]
) -> Float[np.ndarray, "O I"]:
    """fp32 numbers of a matrix in blocks of 128 x 128; the last blocks may be smaller."""
    rows, columns = stored.shape
    wide = scale.astype(np.float32).repeat(FP8_BLOCK, axis=0)[:rows]
    return stored.astype(np.float32) * wide.repeat(FP8_BLOCK, axis=1)[:, :columns]


def dequantize_fp4(
    stored: Int8[np.ndarray, "O I/2"], scale: Float[np.ndarray, "O I/32"]
) -> Float[np.ndarray, "O I"]:
    """fp32 numbers of a matrix of packed e2m1 pairs."""
    codes = stored.view(np.uint8)
    pairs = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1)
    numbers = pairs.reshape(stored.shape[0], -1)
    wide = scale.astype(np.float32).repeat(FP4_BLOCK, axis=1)
    return numbers * wide[:, : numbers.shape[1]]


def scale_of(name: str) -> str:
    """The name of the scales of the matrix ``name``."""
    return name.removesuffix("weight") + "scale"
