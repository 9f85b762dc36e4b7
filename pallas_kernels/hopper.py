"""Whether this process computes on the GPUs that the kernels are written for."""

from __future__ import annotations

import jax


def missing_hopper() -> str | None:
    """None on a Hopper GPU, else what the first device is and what was wanted."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) == "9.0":
        return None
    return f"the device is {device.device_kind}, wanted a Hopper GPU (compute capability 9.0)"
