"""Everything about an engine that is fixed at its start, and the checks of it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax

from dspark_jax.calibration.file import Calibration
from dspark_jax.decode.config import Mode, Policy, StepConfig
from dspark_jax.decode.request import check_whole
from dspark_jax.models.pages import PagePool
from dspark_jax.schedule.cost import CostTables

GPU_PROMPT_ROWS, CPU_PROMPT_ROWS = 256, 64
"""Least prompt tokens of a step, when ``max_batched_tokens`` leaves it open.

A GPU takes little longer for many rows than for few; a CPU takes as much longer as there are more,
and so does for every row of the room that stays empty.
"""

PROMPT_ROWS_A_REQUEST = 4
"""Prompt tokens of a step for each request, so that what comes keeps pace with what ends.

A short question's hundred tokens come back after some sixty steps, and one step in a few carries
prompts.
"""

GPU_STEPS = 4
"""Steps of a dispatch on a GPU: in the time of fewer the host could not prepare the next one."""

LONG_GPU_STEPS = 2
"""The same where many requests make the steps long."""

MANY_LANES = 512
"""Requests of which a step is long."""

FEW_PIECES = 16
"""Pieces of prompts that get a program of their own, and four times as many, and so on."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine serves. Counts are of tokens unless they say otherwise.

    Attributes:
        max_requests: requests decoded together; the others wait.
        max_context: most tokens of prompt and answer together; None takes 2048 or what the
            target was made for.
        mode: "off", "static", "compact" or "cap-accept"; None takes the most the pair can do.
        k: drafts of a block; None takes the drafter's block size. With mode "static" this is
            decoding with fixed k.
        threshold: None, or the confidence below which a window ends, in place of a budget.
        policy: "lagged", "causal" or "fresh".
        lag: least age in steps of the confidences that decide a "lagged" budget.
        allow_biased: consent to policy "fresh" at temperatures above 0.
        cost_table: path of a cost table, or tables for ``max_requests``; None verifies all drafts.
        correct_costs: let the cost table follow the step times that are seen; mode "compact".
        calibration: STS temperatures, or the path of their file.
        page_size: rows of a page; a multiple of 64 suits the GPU kernel.
        pages: pages of the pool; None holds the whole context of every request.
        prefix_reuse: keep full pages for later requests whose text begins the same; None does
            wherever pages hold all that target and drafter keep of a text.
        prompt_width: rows of a piece of a prompt; the GPU kernel takes 64 N / H at most, and an
            even number.
        max_batched_tokens: most rows of a step: full windows of all requests, and as many pieces
            of prompts as fit beside them. None takes 4 prompt rows a request, 256 at least.
        batch_tiers: increasing request counts that a step is compiled for, up to
            ``max_requests``; None takes powers of four.
        token_tiers: increasing row counts that a compact step is compiled for, beside full windows
            and, with a cost table, every anchor alone; None takes 2, 3, 4 and 6 eighths of full
            windows. With a cost table, those that save next to nothing are left out.
        context_tiers: increasing row counts that attention is compiled for, beside
            ``max_context``: a step whose texts are all shorter reads no more than that.
        bound_blocks: bound what full blocks would have committed, for the metrics; modes "compact"
            and "cap-accept".
        steps: steps of one dispatch, beside one in which prompts are read; None takes what
            `dispatch_steps` says.
        overlap: prepare a step while the one before runs. False waits for every step; tokens
            are the same.
    """

    max_requests: int = 16
    max_context: int | None = None
    mode: Mode | None = None
    k: int | None = None
    threshold: float | None = None
    policy: Policy = "lagged"
    lag: int = 1
    allow_biased: bool = False
    cost_table: CostTables | str | Path | None = None
    correct_costs: bool = True
    calibration: Calibration | str | Path | None = None
    page_size: int = 64
    pages: int | None = None
    prefix_reuse: bool | None = None
    prompt_width: int = 16
    max_batched_tokens: int | None = None
    batch_tiers: tuple[int, ...] | None = None
    token_tiers: tuple[int, ...] | None = None
    context_tiers: tuple[int, ...] = ()
    bound_blocks: bool = False
    steps: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("max_requests", "lag", "page_size", "prompt_width"):
            check_whole(name, getattr(self, name))
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; wanted 1 or more")
        for name in ("max_context", "k", "pages", "max_batched_tokens", "steps"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; wanted 1 or more")
        tiers = self.batch_tiers
        if tiers is not None and not (_increasing(tiers) and tiers[-1] == self.max_requests):
            raise ValueError(
                f"batch_tiers are {tiers}; wanted increasing request counts that end at "
                f"max_requests, {self.max_requests}"
            )
        for name in ("token_tiers", "context_tiers"):
            if getattr(self, name) and not _increasing(getattr(self, name)):
                raise ValueError(f"{name} are {getattr(self, name)}; wanted increasing row counts")
        if self.token_tiers and self.mode in ("off", "static"):
            raise ValueError(
                f"token_tiers are {self.token_tiers} in mode {self.mode!r}, whose steps have one "
                'size; wanted mode "compact" or "cap-accept", or no token_tiers'
            )

    @property
    def priced(self) -> bool:
        """Whether costs decide windows, where windows are decided."""
        table = self.cost_table
        known = not isinstance(table, CostTables) or bool(table.known)
        return table is not None and known and self.threshold is None

    def dispatch_steps(self, requests: int) -> int:
        """Steps of a dispatch in which so many take part, beside one in which prompts are read.

        Who ends takes part until the dispatch after is over, so they are few; on a GPU enough for
        the host to prepare and launch the next dispatch meanwhile.
        """
        if self.steps is not None:
            return self.steps
        if jax.default_backend() != "gpu":
            return 1
        lanes = next(tier for tier in self.batches() if tier >= requests)
        return GPU_STEPS if lanes < MANY_LANES else LONG_GPU_STEPS

    def batches(self) -> tuple[int, ...]:
        """Request counts that a step is compiled for."""
        if self.batch_tiers is not None:
            return self.batch_tiers
        powers = itertools.takewhile(
            lambda size: size < self.max_requests, (4**power for power in itertools.count())
        )
        return (*powers, self.max_requests)

    def row_counts(self, width: int, batch: int) -> tuple[int, ...]:
        """Rows that a step of this many requests may verify, for windows of ``width`` rows."""
        full = batch * width
        if self.token_tiers is not None:
            return (*(rows for rows in self.token_tiers if batch <= rows < full), full)
        eighths = {full * part // 8 for part in (2, 3, 4, 6, 8)}
        return tuple(sorted({rows for rows in eighths if rows > batch} | {batch}))

    def stepping(self, step: StepConfig, batch: int) -> StepConfig:
        """The step of this many requests: with the row counts that it is compiled for."""
        if step.mode != "compact":
            return step
        return dataclasses.replace(step, buckets=self.row_counts(step.width, batch))

    def columns(self, context: int) -> tuple[int, ...]:
        """Page counts of a request that a step is compiled for."""
        for rows in self.context_tiers:
            if rows > context:
                raise ValueError(f"a context tier is {rows} rows, max_context is {context}")
        tiers = {-(-rows // self.page_size) for rows in (*self.context_tiers, context)}
        return tuple(sorted(tiers))

    def pool(self, context: int) -> PagePool:
        """The pages of this engine.

        Raises:
            ValueError: fewer pages than one request may need.
        """
        columns = -(-context // self.page_size)
        pages = self.max_requests * columns if self.pages is None else self.pages
        if pages < columns:
            raise ValueError(
                f"pages is {pages}; wanted at least {columns}, which a request of {context} "
                f"tokens needs in pages of {self.page_size} rows"
            )
        return PagePool(pages, self.page_size, columns)

    def pieces(self, width: int) -> int:
        """Pieces of prompts in one step beside windows of ``width`` rows.

        Raises:
            ValueError: ``max_batched_tokens`` leaves no room for one.
        """
        windows = self.max_requests * width
        if self.max_batched_tokens is None:
            return usual_pieces(self.max_requests, self.prompt_width)
        pieces = (self.max_batched_tokens - windows) // self.prompt_width
        if pieces < 1:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}; wanted at least "
                f"{windows + self.prompt_width}: {self.max_requests} windows of {width} rows and "
                f"a piece of {self.prompt_width} prompt rows"
            )
        return pieces


def usual_pieces(requests: int, prompt_width: int) -> int:
    """Pieces of prompts in a step, of so many rows, with which so many requests keep pace."""
    least = GPU_PROMPT_ROWS if jax.default_backend() == "gpu" else CPU_PROMPT_ROWS
    rows = max(least, PROMPT_ROWS_A_REQUEST * requests)
    return max(1, rows // prompt_width)


def piece_tiers(most: int) -> tuple[int, ...]:
    """Pieces of prompts that a step is compiled for, which may carry ``most``."""
    powers = (FEW_PIECES * 4**power for power in itertools.count())
    return tuple(sorted({1, *itertools.takewhile(lambda size: size < most, powers), most}))


def check_prompt_width(width: int, backend: str) -> None:
    """Refuse pieces of prompts behind which windows would begin off the kernels' alignment.

    Raises:
        ValueError: an odd width on a GPU.
    """
    if backend == "gpu" and width % 2:
        raise ValueError(f"prompt_width is {width}; wanted an even number on a GPU")


def _increasing(values: tuple[int, ...]) -> bool:
    pairs = itertools.pairwise(values)
    return bool(values) and values[0] >= 1 and all(a < b for a, b in pairs)
