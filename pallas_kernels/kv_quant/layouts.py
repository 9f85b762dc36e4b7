"""Where the bytes of a cache row are."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """A row: e4m3 numbers with one power-of-two scale a block, then bf16 numbers (RoPE).

    Attributes:
        quantised: numbers in e4m3.
        block: numbers that share a scale.
        plain: numbers in bf16.
        exponents: scales are e8m0 bytes, padded to eight, and a page holds all its rows' numbers
            first and their scales after them; otherwise scales are fp32 and stand in their row
            between the two kinds of numbers.
    """

    quantised: int
    block: int
    plain: int
    exponents: bool

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.quantised + self.plain

    @property
    def number_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return self.quantised + 2 * self.plain

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, padding included."""
        scales = self.quantised // self.block
        return -(-scales // 8) * 8 if self.exponents else 4 * scales

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.number_bytes + self.scale_bytes

    def starts(self, offset: Any, page_size: int) -> tuple[Any, Any, Any]:
        """Bytes of a page where numbers, plain numbers and scales of row ``offset`` start."""
        if self.exponents:
            first = offset * self.number_bytes
            scales = page_size * self.number_bytes + offset * self.scale_bytes
            return first, first + self.quantised, scales
        first = offset * self.row_bytes
        scales = first + self.quantised
        return first, scales + self.scale_bytes, scales

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, whose stride FlashMLA wants to be a multiple of a row's numbers."""
        used = page_size * self.row_bytes
        return -(-used // self.number_bytes) * self.number_bytes if self.exponents else used


V3_2 = Layout(quantised=512, block=128, plain=64, exponents=False)
"""DeepSeek-V3.2: 656 bytes a row, pools ``[N, P, 656]`` (vLLM's ``fp8_ds_mla``)."""

V4 = Layout(quantised=448, block=64, plain=64, exponents=True)
"""DeepSeek-V4: 584 bytes a row, pools ``[N, page_bytes]`` (FlashMLA's MODEL1)."""
