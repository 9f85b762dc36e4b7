"""The decode loop alone, every slot occupied: no prefill, no refill, no answer ending.

A session's tokens per second hold all of that as well; this is the step itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode import slots as slot_programs
from dspark_jax.decode.request import SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.decode.slots import Admission
from dspark_jax.decode.state import State

H200_BYTES_PER_SECOND = 4.3e12
"""Device-to-device copy measured on one NVIDIA H200."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A timed run of steps with every slot live; ``context`` is the mean of cache rows a slot."""

    steps: int
    tokens: int
    seconds: float
    context: float


class Occupied:
    """The step of a session, with slots that never end.

    Its programs are those the session has compiled: same shapes, same config.
    """

    def __init__(self, session: Generator, temperature: float) -> None:
        self._temperature = temperature
        self._config = session._variant((SamplingParams(temperature=temperature),))
        self._programs = session._programs

    def fill(self, prompts: Sequence[Sequence[int]]) -> State:
        """Slots that hold these prompts, repeated as needed."""
        slots, context = self._programs.slots, self._programs.context
        admissions = []
        for slot in range(slots):
            prompt = prompts[slot % len(prompts)]
            admissions.append(
                Admission(
                    slot=slot,
                    prompt_ids=prompt,
                    temperature=self._temperature,
                    top_k=0,
                    top_p=1.0,
                    seed=slot,
                    max_new_tokens=context - len(prompt),
                    stop_ids=(),
                )
            )
        return self._programs.fill(
            self._programs.start(self._config), admissions, config=self._config
        )

    def time(self, prompts: Sequence[Sequence[int]], steps: int, chunks: int) -> list[Chunk]:
        """Time ``chunks`` runs of ``steps`` steps, after one untimed run of ``steps``.

        Raises:
            ValueError: the context cannot hold that many tokens.
            RuntimeError: a slot ended, or the steps produced nothing.
        """
        longest = max(map(len, prompts))
        needed = longest + (chunks + 1) * steps * self._config.width
        if needed > self._programs.context:
            raise ValueError(
                f"{chunks + 1} runs of {steps} steps may need {needed} tokens of context; "
                f"the session has {self._programs.context}"
            )
        state = self._programs.run(self.fill(prompts), steps, config=self._config)
        found = []
        before, length = self._look(state)
        for _ in range(chunks):
            begin = time.perf_counter()
            state = self._programs.run(state, steps, config=self._config)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - begin
            after, end = self._look(state)
            found.append(Chunk(steps, after - before, seconds, (length + end) / 2))
            if not found[-1].tokens:
                raise RuntimeError("the timed steps produced no token")
            before, length = after, end
        return found

    def _look(self, state: State) -> tuple[int, float]:
        """Tokens emitted so far and the mean of cache rows a slot."""
        status = self._programs.status(state)
        if not status.active.all():
            raise RuntimeError(f"only {int(status.active.sum())} slots of {len(status.active)} run")
        return int(status.emitted.sum()), float(np.mean(jax.device_get(state.cache.length)))

    def compiled_text(self) -> str:
        """Optimised program of the device loop, a step a turn."""
        state = self._programs.start(self._config)
        lowered = slot_programs._RUN(self._programs.slots * self._config.width).lower(
            self._programs.weights,
            state,
            self._programs.tables,
            np.int32(1),
            np.int32(0),
            config=self._config,
            turn=1,  # whose kernels are those of a step
        )
        text = lowered.compile().as_text()
        assert text is not None
        return text


def floor_seconds(
    target: LoadedTarget, drafter: LoadedDrafter | None, slots: int, context: float
) -> float | None:
    """Least seconds of a step on an H200: what it must read, over the memory's speed.

    The target's matrices and head once; the drafter's once, its head (the target's, if
    borrowed) once more, the Markov head's second matrix once a position; keys and values of
    every live cache row once, of target and drafter. None on other devices.
    """
    if "H200" not in jax.devices()[0].device_kind:
        return None
    weights = target.weights
    read = _bytes(weights.layers) + _bytes(weights.head)
    rows = _row_bytes(target.config, weights.embed.dtype.itemsize)
    if drafter is not None:
        own = drafter.weights
        head = weights.head if own.lm_head is None else own.lm_head
        read += _bytes((own.fc, own.layers, own.confidence)) + _bytes(head)
        if own.markov is not None:
            walked = dataclasses.replace(own.markov, w1=None)
            read += drafter.config.block_size * _bytes(walked)
        rows += _row_bytes(drafter.config, own.fc.dtype.itemsize)
    return (read + slots * context * rows) / H200_BYTES_PER_SECOND


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _row_bytes(config: Any, itemsize: int) -> int:
    """Keys and values of one cache row over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
