"""Which layers' outputs a drafter may ask a target for."""

from __future__ import annotations


def check_taps(taps: tuple[int, ...], layers: int) -> None:
    """Refuse a tap outside -1 (the embedding) to the last of ``layers``.

    Raises:
        ValueError: names the first that is no layer.
    """
    for tap in taps:
        if not -1 <= tap < layers:
            raise ValueError(
                f"tap {tap} is no layer of this model: wanted -1 (embedding) to {layers - 1}"
            )
