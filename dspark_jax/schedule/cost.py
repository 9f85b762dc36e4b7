"""Cost tables: seconds a step takes, by tokens verified, requests drafted and context.

The file is JSON::

    {"device": "NVIDIA H200", "model": "smollm2-135m", "dtype": "bfloat16", "block_size": 7,
     "contexts": [0, 4096],
     "verify": {"tokens": [1, 8, 16], "seconds": [[1e-3, 2e-3], [2e-3, 3e-3], [3e-3, 4e-3]]},
     "draft": {"requests": [1, 8], "seconds": [[1e-3, 1e-3], [2e-3, 2e-3]]},
     "largest_bucket": 16}

``contexts`` counts live cache rows over the whole step; ``seconds[i][c]`` belongs to size i and
context c. ``largest_bucket`` is the largest size that a step is padded up to; larger sizes were
timed as they are. SGLang's floor-probe and additive tables are read as well.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dspark_jax.calibration.file import Calibration
from dspark_jax.json_file import read_object


@flax.struct.dataclass
class CostTables:
    """Costs and STS temperatures as arrays of fixed shape: an argument of the step, never static.

    Attributes:
        verify: ``[C, S(G+1)+1]`` seconds to verify 0, 1, ... tokens at each context.
        draft: ``[C, S+1]`` seconds to draft for 0, 1, ... requests at each context.
        contexts: ``[C]`` live cache rows over the whole step, increasing.
        known: False when no table was given; then budgets are not searched.
        temperatures: ``[M, G]`` STS temperatures, one row a sampling temperature.
        temperature_keys: ``[M]`` the sampling temperatures, 0 = greedy.
    """

    verify: Float[Array, "C X"]
    draft: Float[Array, "C R"]
    contexts: Float[Array, "C"]
    known: Bool[Array, ""]
    temperatures: Float[Array, "M G"]
    temperature_keys: Float[Array, "M"]


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """Timed sizes of one operation; ``seconds`` is ``[sizes, C]``."""

    sizes: np.ndarray
    seconds: np.ndarray
    largest_bucket: float

    def at(self, wanted: np.ndarray) -> np.ndarray:
        """``[C, len(wanted)]`` seconds, non-decreasing in the size.

        A running maximum takes out timing noise. Up to the largest bucket a size costs what the
        smallest measured size that holds it costs; above, costs are linear between the points
        above it, and follow their last slope past the end.
        """
        seconds = np.maximum.accumulate(self.seconds, axis=0)
        columns = [self._column(wanted, seconds[:, c]) for c in range(seconds.shape[1])]
        return np.stack(columns)

    def _column(self, wanted: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        holder = np.searchsorted(self.sizes, wanted, side="left")
        stairs = seconds[np.minimum(holder, len(seconds) - 1)]
        beyond = self.sizes > self.largest_bucket
        points = beyond if beyond.any() else self.sizes == self.sizes[-1]
        line = np.interp(wanted, self.sizes[points], seconds[points])
        tail = points if points.sum() > 1 else np.ones_like(points)
        if tail.sum() > 1:
            sizes, values = self.sizes[tail], seconds[tail]
            slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        else:
            slope = seconds[-1] / self.sizes[-1]
        line = line + slope * np.maximum(wanted - self.sizes[-1], 0)
        return np.where(wanted <= min(self.largest_bucket, self.sizes[-1]), stairs, line)


def no_costs(slots: int, block_size: int) -> CostTables:
    """The tables of a session without measurements: everything valid gets verified."""
    return CostTables(
        verify=jnp.ones((1, slots * (block_size + 1) + 1), jnp.float32),
        draft=jnp.zeros((1, slots + 1), jnp.float32),
        contexts=jnp.zeros(1, jnp.float32),
        known=jnp.asarray(False),
        temperatures=jnp.ones((1, block_size), jnp.float32),
        temperature_keys=jnp.zeros(1, jnp.float32),
    )


def load_costs(
    path: str | Path,
    *,
    slots: int,
    block_size: int,
    buckets: tuple[int, ...] | None,
    prompt_rows: int = 0,
    device: str,
    model: str,
    dtype: str,
) -> CostTables:
    """Read a cost table for an engine of ``slots`` requests.

    ``buckets`` are the token counts the engine pads a verify to (None: it does not pad), so
    n tokens cost what their bucket costs. ``prompt_rows`` more tokens ride in every verify and are
    part of its cost, not of n. Temperatures are the identity; see
    ``with_calibration``.

    Raises:
        ValueError: the file is malformed, or was measured for another device, model, dtype or
            block size. SGLang's files do not say what they were measured for.
    """
    data = read_object(path)
    if "bias_seconds" in data:
        verify, draft = _additive(data, path, slots, block_size)
        contexts = np.zeros(1)
    elif "sample_batch_tokens" in data:
        verify, draft = _floor_probe(data, path, slots, block_size)
        contexts = np.zeros(1)
    else:
        wanted = {"device": device, "model": model, "dtype": dtype, "block_size": block_size}
        for name, value in wanted.items():
            found = _field(data, name, path)
            if found != value:
                raise ValueError(
                    f"cost table {path} was measured for {name} {found!r}, "
                    f"but this session runs {name} {value!r}: measure it again"
                )
        contexts = _increasing(_field(data, "contexts", path), "contexts", path, least=0)
        verify, draft = _measured(data, path, len(contexts))
    tokens = np.arange(slots * (block_size + 1) + 1)
    if buckets is not None:
        bucket = np.searchsorted(np.asarray(buckets), tokens, side="left")
        padded = np.asarray(buckets)[np.minimum(bucket, len(buckets) - 1)]
        tokens = np.maximum(tokens, padded)
    tokens = tokens + prompt_rows
    identity = no_costs(slots, block_size)
    return dataclasses.replace(
        identity,
        verify=jnp.asarray(verify.at(tokens), jnp.float32),
        draft=jnp.asarray(draft.at(np.arange(slots + 1)), jnp.float32),
        contexts=jnp.asarray(contexts, jnp.float32),
        known=jnp.asarray(True),
    )


def with_calibration(tables: CostTables, calibration: Calibration) -> CostTables:
    """``tables`` with the STS temperatures of a calibration file.

    Raises:
        ValueError: the block sizes differ.
    """
    block_size = tables.temperatures.shape[1]
    if calibration.block_size != block_size:
        raise ValueError(
            f"calibration holds {calibration.block_size} temperatures an entry, "
            f"the drafter's block size is {block_size}"
        )
    keys, temperatures = calibration.rows()
    return dataclasses.replace(
        tables,
        temperatures=jnp.asarray(temperatures, jnp.float32),
        temperature_keys=jnp.asarray(keys, jnp.float32),
    )


def _measured(
    data: dict[str, Any], path: str | Path, contexts: int
) -> tuple[MeasuredCosts, MeasuredCosts]:
    verify, draft = _field(data, "verify", path), _field(data, "draft", path)
    tokens = _increasing(_field(verify, "tokens", path), "verify.tokens", path)
    requests = _increasing(_field(draft, "requests", path), "draft.requests", path)
    largest = float(_numbers(_field(data, "largest_bucket", path), "largest_bucket", path, ndim=0))
    if largest < 1:
        raise ValueError(f"cost table {path}: largest_bucket is {largest:g}, wanted 1 or more")
    return (
        MeasuredCosts(
            tokens,
            _seconds(
                _field(verify, "seconds", path), "verify.seconds", (len(tokens), contexts), path
            ),
            largest,
        ),
        MeasuredCosts(
            requests,
            _seconds(
                _field(draft, "seconds", path), "draft.seconds", (len(requests), contexts), path
            ),
            int(requests[-1]),
        ),
    )


def _additive(
    data: dict[str, Any], path: str | Path, slots: int, block_size: int
) -> tuple[MeasuredCosts, MeasuredCosts]:
    """SGLang's T = bias + α(requests) + θ(tokens), linear between probes and clamped outside.

    α is the draft's share; bias and θ are the verify's.
    """
    bias = float(_numbers(_field(data, "bias_seconds", path), "bias_seconds", path, ndim=0))
    if not bias > 0:
        raise ValueError(f"cost table {path}: bias_seconds is {bias}, it must be above 0")
    costs = []
    for probes, seconds, wanted in (
        ("m_probes", "theta_seconds", slots * (block_size + 1)),
        ("bs_probes", "alpha_seconds", slots),
    ):
        sizes = _increasing(_field(data, probes, path), probes, path)
        values = _numbers(_field(data, seconds, path), seconds, path, ndim=1)
        if values.shape != sizes.shape:
            raise ValueError(
                f"cost table {path}: {seconds} has {values.size} values for {sizes.size} {probes}"
            )
        every = np.arange(1, wanted + 1)
        costs.append(np.interp(every, sizes, values))
    verify = bias + costs[0]
    if not (verify > 0).all():
        raise ValueError(
            f"cost table {path}: bias_seconds + theta_seconds falls to {verify.min()}, "
            "a step must take time"
        )
    return _per_size(verify), _per_size(costs[1])


def _floor_probe(
    data: dict[str, Any], path: str | Path, slots: int, block_size: int
) -> tuple[MeasuredCosts, MeasuredCosts]:
    """SGLang's steps per second of whole steps: a size runs at the rate of the probe below it."""
    sizes = _increasing(_field(data, "sample_batch_tokens", path), "sample_batch_tokens", path)
    name = "sample_steps_per_sec"
    rates = _numbers(_field(data, name, path), name, path, ndim=1)
    if rates.shape != sizes.shape or not (rates > 0).all():
        raise ValueError(
            f"cost table {path}: {name} must hold {sizes.size} rates above 0, "
            f"found {rates.tolist()}"
        )
    every = np.arange(1, slots * (block_size + 1) + 1)
    probe = np.maximum(np.searchsorted(sizes, every, side="right") - 1, 0)
    return _per_size(1.0 / rates[probe]), _per_size(np.zeros(slots))


def _per_size(seconds: np.ndarray) -> MeasuredCosts:
    """Costs already known for every size 1, 2, ..."""
    sizes = np.arange(1, len(seconds) + 1)
    return MeasuredCosts(sizes, seconds[:, None], len(seconds))


def _field(data: Any, name: str, path: str | Path) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"cost table {path}: wanted an object that holds {name}, found {data!r}")
    if name not in data:
        raise ValueError(f"cost table {path}: {name} is missing, found {sorted(data)}")
    return data[name]


def _numbers(values: Any, name: str, path: str | Path, *, ndim: int) -> np.ndarray:
    """``values`` as an array of ``ndim`` axes, numbers all, none of them NaN."""
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim != ndim or np.isnan(array).any():
        wanted = ("a number", "a list of numbers", "a list of lists of numbers, all of one length")
        raise ValueError(f"cost table {path}: {name} is {values!r}; wanted {wanted[ndim]}")
    return array


def _increasing(values: Any, name: str, path: str | Path, least: float = 1) -> np.ndarray:
    array = _numbers(values, name, path, ndim=1)
    if not array.size or array[0] < least or not (np.diff(array) > 0).all():
        raise ValueError(
            f"cost table {path}: {name} must be a list that increases from {least} or more, "
            f"found {values}"
        )
    return array


def _seconds(values: Any, name: str, shape: tuple[int, int], path: str | Path) -> np.ndarray:
    array = _numbers(values, name, path, ndim=2)
    if array.shape != shape:
        raise ValueError(
            f"cost table {path}: {name} has shape {array.shape}, sizes by contexts ask for {shape}"
        )
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"cost table {path}: {name} must be finite and above 0, found {values}")
    return array
