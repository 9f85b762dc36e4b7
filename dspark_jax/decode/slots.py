"""The compiled programs of a session: fill slots, run steps, read answers; shapes never change."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.compiling import bound, jit_for_rows
from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.request import MAX_STOP_IDS
from dspark_jax.decode.state import Logprobs, Requests, State, init_state, request_keys
from dspark_jax.decode.step import Weights
from dspark_jax.schedule.cost import CostTables

PREFILL_REQUESTS = 32
"""Prompts prefilled together at most."""

READ_REQUESTS = 128
"""Answers read back together at most."""

PREFILL_WIDTHS = (32, 128)
"""Prompt tokens forwarded at once: a short width for short prompts and remainders."""


@flax.struct.dataclass
class Rows:
    """Answers of a few slots, as ``State`` holds them."""

    tokens: Int[Array, "A M"]
    windows: Int[Array, "A M"]
    accepted: Int[Array, "A M"]
    commits: Int[Array, "A M"]
    logprobs: Logprobs | None
    confidence_log: Float[Array, "A M G"] | None = None


@flax.struct.dataclass
class Status:
    """What the host looks at between chunks."""

    active: Array
    emitted: Array
    steps: Array
    finish: Array


@dataclasses.dataclass(frozen=True)
class Admission:
    """A request on its way into a slot."""

    slot: int
    prompt_ids: Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: int
    stop_ids: Sequence[int]


def _read(state: State, slots: Int[Array, "A"]) -> Rows:
    def pick(values: Array) -> Array:
        return jnp.take(values, slots, axis=0, mode="clip")

    return Rows(
        tokens=pick(state.tokens),
        windows=pick(state.windows),
        accepted=pick(state.accepted),
        commits=pick(state.commits),
        logprobs=jax.tree.map(pick, state.logprobs),
        confidence_log=jax.tree.map(pick, state.confidence_log),
    )


def _admit(
    state: State, slots: Int[Array, "A"], anchor: Array, seeds: Array, requests: Requests
) -> State:
    requests = dataclasses.replace(requests, seed=request_keys(seeds))
    return loop.admit(state, slots, anchor, requests)


_INIT = jax.jit(
    init_state,
    static_argnames=("config", "slots", "capacity", "max_tokens", "dtype", "stop_width"),
)
_CLEAR = jax.jit(loop.clear, donate_argnums=0)
_PREFILL = jit_for_rows(loop.prefill, static_argnames="config", donate_argnums=1)
_ADMIT = jax.jit(_admit, donate_argnums=0)
_RUN = jit_for_rows(loop.run_steps, static_argnames=("config", "turn"), donate_argnums=1)
_READ = jax.jit(_read)


@dataclasses.dataclass(frozen=True)
class SlotPrograms:
    """Every program a session runs, bound to its shapes.

    Attributes:
        slots: requests decoded together, S.
        context: most tokens of prompt and answer together.
        dtype: of the caches.
    """

    weights: Weights
    tables: CostTables
    slots: int
    context: int
    dtype: Any

    @property
    def group(self) -> int:
        """Slots filled together, A: an eighth, so that few free slots do not pay for many."""
        return max(1, min(self.slots // 8, PREFILL_REQUESTS))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Prefill widths that a prompt of this context can use."""
        return tuple(width for width in PREFILL_WIDTHS if width <= self.context) or (
            PREFILL_WIDTHS[0],
        )

    def start(self, config: StepConfig) -> State:
        """Empty slots."""
        state = _INIT(
            config,
            slots=self.slots,
            capacity=self.context,
            max_tokens=self.context,
            dtype=self.dtype,
            stop_width=MAX_STOP_IDS,
        )
        return bound(state)

    def clear(self, state: State, slots: Sequence[int]) -> State:
        """Stop decoding in these slots."""
        for part in itertools.batched(slots, self.group):
            state = _CLEAR(state, self._padded(part, self.group))
        return state

    def fill(self, state: State, admissions: Sequence[Admission], *, config: StepConfig) -> State:
        """Prefill prompts and start decoding them; prompts of like length share a group."""
        by_length = sorted(admissions, key=lambda admission: len(admission.prompt_ids))
        for part in itertools.batched(by_length, self.group):
            state = self._fill_group(state, part, config)
        return state

    def run(self, state: State, steps: int, keep: int = 0, *, config: StepConfig) -> State:
        """Decode up to ``steps`` steps, or until no more than ``keep`` slots are active."""
        return self._run(state, steps, keep, _turn(steps), config)

    def _run(self, state: State, steps: int, keep: int, turn: int, config: StepConfig) -> State:
        limits = np.int32(steps), np.int32(keep)
        run = _RUN(self.slots * config.width)
        return run(self.weights, state, self.tables, *limits, config=config, turn=turn)

    def status(self, state: State) -> Status:
        """Progress of every slot, on the host: the one read of a chunk."""
        return jax.device_get(Status(state.active, state.emitted, state.steps, state.finish))

    def read(self, state: State, slots: Sequence[int]) -> dict[int, Rows]:
        """Answers of these slots so far, on the host, one ``Rows`` without leading axis each."""
        found = {}
        size = min(self.slots, READ_REQUESTS)
        for part in itertools.batched(slots, size):
            rows = jax.device_get(_READ(state, self._padded(part, size)))
            for index, slot in enumerate(part):
                found[slot] = jax.tree.map(lambda values, index=index: values[index], rows)
        return found

    def compile(self, config: StepConfig, steps: Sequence[int]) -> None:
        """Trace and compile everything, running nothing: no slot is filled, no step taken.

        ``steps`` are those that `run` will be called with.
        """
        state = self.start(config)
        nowhere = self._padded([], self.group)
        state = _CLEAR(state, nowhere)
        for width in self.widths:
            state = self._prefill(state, nowhere, [], 0, width, config)
        state = self._admit(state, [])
        for turn in sorted({_turn(count) for count in steps}):
            state = self._run(state, 0, 0, turn, config)
        self.read(state, [0])
        jax.block_until_ready(state)

    def _padded(self, slots: Sequence[int], size: int) -> np.ndarray:
        """``slots`` and out-of-range ones after them."""
        padded = np.full(size, self.slots, np.int32)
        padded[: len(slots)] = slots
        return padded

    def _fill_group(
        self, state: State, admissions: Sequence[Admission], config: StepConfig
    ) -> State:
        slots = self._padded([admission.slot for admission in admissions], self.group)
        state = _CLEAR(state, slots)
        # The last token of a prompt is the anchor of its first step.
        prompts = [admission.prompt_ids[:-1] for admission in admissions]
        longest = max(map(len, prompts))
        begin = 0
        while begin < longest:
            left = longest - begin
            # Two short pieces cost less than a long one that is mostly padding.
            width = self.widths[0] if left <= 2 * self.widths[0] else self.widths[-1]
            state = self._prefill(state, slots, prompts, begin, width, config)
            begin += width
        return self._admit(state, admissions)

    def _prefill(
        self,
        state: State,
        slots: np.ndarray,
        prompts: Sequence[Sequence[int]],
        begin: int,
        width: int,
        config: StepConfig,
    ) -> State:
        tokens = np.zeros((self.group, width), np.int32)
        count = np.zeros(self.group, np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[begin : begin + width]
            tokens[row, : len(piece)] = piece
            count[row] = len(piece)
        prefill = _PREFILL(tokens.size)
        return prefill(self.weights, state, slots, tokens, count, config=config)

    def _admit(self, state: State, admissions: Sequence[Admission]) -> State:
        size = self.group

        def column(name: str, dtype: Any) -> Any:
            values = np.zeros(size, dtype)
            values[: len(admissions)] = [getattr(admission, name) for admission in admissions]
            return values

        anchor = np.zeros(size, np.int32)
        stop_ids: Any = np.full((size, MAX_STOP_IDS), -1, np.int32)
        for row, admission in enumerate(admissions):
            anchor[row] = admission.prompt_ids[-1]
            stop_ids[row, : len(admission.stop_ids)] = admission.stop_ids
        no_seeds: Any = np.zeros((size, 2), np.uint32)
        context: Any = np.full(size, self.context, np.int32)
        requests = Requests(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            seed=no_seeds,
            max_new_tokens=column("max_new_tokens", np.int32),
            context=context,
            stop_ids=stop_ids,
        )
        slots = self._padded([admission.slot for admission in admissions], self.group)
        return _ADMIT(state, slots, anchor, column("seed", np.uint32), requests)


def _turn(steps: int) -> int:
    """Steps between two looks at the loop's condition: as suits the device, and no step more."""
    return math.gcd(steps, loop.steps_a_turn())
