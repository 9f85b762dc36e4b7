"""Cost tables: seconds a step takes, by tokens verified, requests, and context.

The file is JSON::

    {"device": "NVIDIA H200", "model": "smollm2-135m", "dtype": "bfloat16", "block_size": 7,
     "tiers": [
       {"requests": 1, "contexts": [0, 4096], "largest_bucket": 8,
        "verify": {"tokens": [1, 8, 24], "seconds": [[1e-3, 2e-3], [2e-3, 3e-3], [3e-3, 4e-3]]},
        "draft": [1e-3, 1e-3], "walk": {"depths": [1, 7], "shares": [0.4, 1.0]}},
       {"requests": 16, ...}]}

A tier holds the steps of up to so many requests: sixty-four rows of eight requests do not cost
what sixty-four of sixty-four cost. ``contexts`` counts live cache rows over the whole step;
``seconds[i][c]`` belongs to size i and context c. ``largest_bucket`` is the largest size that a
step is padded up to; larger sizes were timed as they are. ``draft`` is of blocks walked to the last
of the depths in ``walk``, which says what share of it the others take; without ``walk`` every depth
costs the same.

Without ``tiers``, ``contexts``, ``verify``, ``largest_bucket`` and ``"draft": {"requests": [1, 8],
"seconds": ...}`` stand in their place and hold for any number of requests. SGLang's floor-probe
and additive tables are read as well.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.struct
import jax
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
        walk: ``[G]`` share of those seconds that a block walked to depth 1, 2, ... takes.
        contexts: ``[C]`` live cache rows over the whole step, increasing.
        known: False when no table was given; then budgets are not searched.
        temperatures: ``[M, G]`` STS temperatures, one row a sampling temperature.
        temperature_keys: ``[M]`` the sampling temperatures, 0 = greedy.
    """

    verify: Float[Array, "C X"]
    draft: Float[Array, "C R"]
    walk: Float[Array, "G"]
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

    def at(self, wanted: np.ndarray, *, padded: bool = True) -> np.ndarray:
        """``[C, len(wanted)]`` seconds, non-decreasing in the size.

        A running maximum takes out timing noise. Up to the largest bucket a size costs what the
        smallest measured size that holds it costs; above, costs are linear between the points
        above it, and follow their last slope past the end. Sizes that are not ``padded`` to
        buckets are linear between all points.
        """
        seconds = np.maximum.accumulate(self.seconds, axis=0)
        columns = [self._column(wanted, seconds[:, c], padded) for c in range(seconds.shape[1])]
        return np.stack(columns)

    def _column(self, wanted: np.ndarray, seconds: np.ndarray, padded: bool) -> np.ndarray:
        points = np.ones(self.sizes.shape, bool)
        if padded:
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
        if not padded:
            return line
        holder = np.searchsorted(self.sizes, wanted, side="left")
        stairs = seconds[np.minimum(holder, len(seconds) - 1)]
        return np.where(wanted <= min(self.largest_bucket, self.sizes[-1]), stairs, line)


@dataclasses.dataclass(frozen=True)
class TierCosts:
    """Costs of the steps of up to ``requests`` requests (None: of any number).

    Attributes:
        requests: lanes the steps were timed with.
        contexts: ``[C]`` live cache rows over the whole step, increasing.
        verify: by rows.
        draft: by requests, of blocks walked to the last of the depths timed.
        walk: the depths timed and the share of ``draft`` that each takes; None when one alone was.
    """

    requests: int | None
    contexts: np.ndarray
    verify: MeasuredCosts
    draft: MeasuredCosts
    walk: tuple[np.ndarray, np.ndarray] | None = None

    def walk_shares(self, block_size: int) -> np.ndarray:
        """``[G]`` share of ``draft`` at every depth: linear between those timed, level beyond."""
        if self.walk is None:
            return np.ones(block_size)
        depths, shares = self.walk
        return np.interp(np.arange(1, block_size + 1), depths, np.maximum.accumulate(shares))


# jitted, because every array by itself would be a program to compile
@functools.partial(jax.jit, static_argnums=(0, 1))
def no_costs(slots: int, block_size: int) -> CostTables:
    """The tables of a session without measurements: everything valid gets verified."""
    return CostTables(
        verify=jnp.ones((1, slots * (block_size + 1) + 1), jnp.float32),
        draft=jnp.zeros((1, slots + 1), jnp.float32),
        walk=jnp.ones(block_size, jnp.float32),
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
    """Read a cost table for steps of ``slots`` requests: by the tier that holds them.

    ``buckets`` are the token counts the engine pads a verify to (None: it does not pad), so
    n tokens cost what their bucket costs. ``prompt_rows`` more tokens ride in every verify and are
    part of its cost, not of n. Temperatures are the identity; see
    ``with_calibration``.

    Raises:
        ValueError: as `read_tiers`.
    """
    tiers = read_tiers(
        path, slots=slots, block_size=block_size, device=device, model=model, dtype=dtype
    )
    holding = (one for one in tiers if one.requests is None or one.requests >= slots)
    tier = next(holding, tiers[-1])
    tokens = np.arange(slots * (block_size + 1) + 1)
    if buckets is not None:
        bucket = np.searchsorted(np.asarray(buckets), tokens, side="left")
        padded = np.asarray(buckets)[np.minimum(bucket, len(buckets) - 1)]
        tokens = np.maximum(tokens, padded)
    # Rows of prompts come on top of a bucket, and their sum is not padded again.
    verify = tier.verify.at(tokens + prompt_rows, padded=not prompt_rows)
    return dataclasses.replace(
        no_costs(slots, block_size),
        verify=jnp.asarray(verify, jnp.float32),
        draft=jnp.asarray(tier.draft.at(np.arange(slots + 1)), jnp.float32),
        walk=jnp.asarray(tier.walk_shares(block_size), jnp.float32),
        contexts=jnp.asarray(tier.contexts, jnp.float32),
        known=jnp.asarray(True),
    )


def beside_prompts(tables: CostTables, rows: int) -> CostTables:
    """``tables`` for verifies that carry ``rows`` rows of prompts besides: n tokens cost n + rows.

    Past its end a table goes on at its mean slope, which padding in it does not bend.
    """
    if not rows:
        return tables
    verify = np.asarray(tables.verify)
    sizes = verify.shape[1]
    wanted = np.arange(sizes) + rows
    slope = (verify[:, -1] - verify[:, 0]) / max(sizes - 1, 1)
    beyond = np.maximum(wanted - (sizes - 1), 0)
    priced = verify[:, np.minimum(wanted, sizes - 1)] + slope[:, None] * beyond
    return dataclasses.replace(tables, verify=jnp.asarray(priced, jnp.float32))


def read_tiers(
    path: str | Path, *, slots: int, block_size: int, device: str, model: str, dtype: str
) -> tuple[TierCosts, ...]:
    """The tiers of a cost table, by increasing requests. Files without tiers have one.

    ``slots`` is how many requests an additive or floor-probe table is laid out for.

    Raises:
        ValueError: the file is malformed, or was measured for another device, model, dtype or
            block size. SGLang's files do not say what they were measured for.
    """
    data = read_object(path)
    if "bias_seconds" in data:
        return (TierCosts(None, np.zeros(1), *_additive(data, path, slots, block_size)),)
    if "sample_batch_tokens" in data:
        return (TierCosts(None, np.zeros(1), *_floor_probe(data, path, slots, block_size)),)
    wanted = {"device": device, "model": model, "dtype": dtype, "block_size": block_size}
    for name, value in wanted.items():
        found = _field(data, name, path)
        if found != value:
            raise ValueError(
                f"cost table {path} was measured for {name} {found!r}, "
                f"but this session runs {name} {value!r}: measure it again"
            )
    if "tiers" not in data:
        return (_curves(data, path),)
    tiers = data["tiers"]
    if not isinstance(tiers, list):
        raise ValueError(f"cost table {path}: tiers is {tiers!r}; wanted a list of objects")
    requests = [_field(one, "requests", path) for one in tiers]
    counts = _increasing(requests, "requests of tiers", path)
    return tuple(_tier(one, int(count), path) for one, count in zip(tiers, counts, strict=True))


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


def _curves(data: dict[str, Any], path: str | Path) -> TierCosts:
    """One curve of verification and one of drafting, for any number of requests."""
    contexts = _increasing(_field(data, "contexts", path), "contexts", path, least=0)
    draft = _field(data, "draft", path)
    requests = _increasing(_field(draft, "requests", path), "draft.requests", path)
    shape = (len(requests), len(contexts))
    seconds = _seconds(_field(draft, "seconds", path), "draft.seconds", shape, path)
    verify = _verification(data, len(contexts), path)
    return TierCosts(None, contexts, verify, MeasuredCosts(requests, seconds, int(requests[-1])))


def _tier(data: dict[str, Any], requests: int, path: str | Path) -> TierCosts:
    """Steps that verify and draft for ``requests`` lanes, whoever of them decodes."""
    contexts = _increasing(_field(data, "contexts", path), "contexts", path, least=0)
    draft = _seconds([_field(data, "draft", path)], "draft", (1, len(contexts)), path)
    verify = _verification(data, len(contexts), path)
    drafting = MeasuredCosts(np.array([requests]), draft, requests)
    return TierCosts(requests, contexts, verify, drafting, _walk(data, path))


def _walk(data: dict[str, Any], path: str | Path) -> tuple[np.ndarray, np.ndarray] | None:
    if "walk" not in data:
        return None
    depths = _increasing(_field(data["walk"], "depths", path), "walk.depths", path)
    shares = _field(data["walk"], "shares", path)
    return depths, _seconds([shares], "walk.shares", (1, len(depths)), path)[0]


def _verification(data: dict[str, Any], contexts: int, path: str | Path) -> MeasuredCosts:
    verify = _field(data, "verify", path)
    tokens = _increasing(_field(verify, "tokens", path), "verify.tokens", path)
    largest = float(_numbers(_field(data, "largest_bucket", path), "largest_bucket", path, ndim=0))
    if largest < 1:
        raise ValueError(f"cost table {path}: largest_bucket is {largest:g}, wanted 1 or more")
    shape = (len(tokens), contexts)
    seconds = _seconds(_field(verify, "seconds", path), "verify.seconds", shape, path)
    return MeasuredCosts(tokens, seconds, largest)


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
