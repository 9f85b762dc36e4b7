"""The compiled programs of an engine, one a tier, all warmed up before the first request."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dspark_jax.compiling import bound, compile_together, jit_for_rows
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.request import MAX_STOP_IDS, SamplingParams
from dspark_jax.decode.setup import Needs, needs_of, serving
from dspark_jax.decode.step import Weights
from dspark_jax.engine import lanes as on_device
from dspark_jax.engine.config import piece_tiers, usual_pieces
from dspark_jax.engine.flight import Flight, Leg
from dspark_jax.engine.lanes import Lanes
from dspark_jax.engine.leaves import Structure, structure_of, touched
from dspark_jax.engine.operands import lanes_of, prompt_rows, starting_of
from dspark_jax.engine.packing import Layout, Packed, pack, unpack
from dspark_jax.engine.roster import Roster
from dspark_jax.engine.scheduler import Piece, Plan
from dspark_jax.engine.sequence import Sequence as Text
from dspark_jax.engine.shapes import ShapeChoice, extremes
from dspark_jax.engine.small_places import keep_places
from dspark_jax.models.pages import PagePool
from dspark_jax.schedule.cost import CostTables

logger = logging.getLogger(__name__)

Call = tuple[Any, ...]
"""A program, what it takes beside weights and state, and its static arguments."""

START_GROUP = 64
"""Requests admitted to decoding by one call at most."""

WARM_RUNS = 2
"""A GPU loads a program's kernels and records its graphs when it runs, not when it compiles."""

_START = jax.jit(
    on_device.start, static_argnames=("config", "slots", "pool", "context", "dtype", "stop_width")
)


@functools.partial(jax.jit, static_argnames=("structure", "places"), donate_argnums=0)
def _admit(
    rows: list[jax.Array], starting: jax.Array, *, structure: Structure, places: tuple[int, ...]
) -> list[jax.Array]:
    """Leaves of the state at ``places``, which are all that it takes."""
    tree, layout = structure.parts
    # what is missing is an object without any attribute: whoever looked at it would fail
    leaves: list[Any] = [object()] * tree.num_leaves
    for place, row in zip(places, rows, strict=True):
        leaves[place] = row
    after = _admitted(leaves, starting, tree, layout)
    return [after[place] for place in places]


def _admitted(leaves: list[Any], starting: Any, tree: Any, layout: Layout) -> list[Any]:
    state = on_device.admit(tree.unflatten(leaves), unpack(Packed(starting, layout)))
    return tree.flatten_up_to(state)


@functools.partial(jit_for_rows, static_argnames=("structure", "config", "steps"), donate_argnums=1)
def _run(
    weights: list[jax.Array],
    state: list[jax.Array],
    tables: list[jax.Array],
    lanes: jax.Array,
    pieces: jax.Array | None,
    *,
    structure: Structure,
    config: StepConfig,
    steps: int,
) -> tuple[list[jax.Array], Packed]:
    weights_tree, state_tree, tables_tree, lanes_layout, pieces_layout = structure.parts
    after, report = on_device.run(
        weights_tree.unflatten(weights),
        state_tree.unflatten(state),
        tables_tree.unflatten(tables),
        unpack(Packed(lanes, lanes_layout)),
        None if pieces is None else unpack(Packed(pieces, pieces_layout)),
        config=config,
        steps=steps,
    )
    return jax.tree.leaves(after), pack(report)


@dataclasses.dataclass
class Programs:
    """Everything an engine runs on the device, bound to its tiers.

    A dispatch is launched while the one before it runs, so that the device goes from one to the
    next. A launch takes the host about as long as a small model's step, so a thread of its own does
    it, in order, and the state belongs to that thread.

    Attributes:
        weights: of the pair.
        roster: who has which slot.
        config: the step, without what depends on requests or tier.
        stepping: a step as it is taken by so many lanes.
        tables: costs of a step of so many lanes that carries so many rows of prompts.
        shapes: what a dispatch of so many lanes, beside so many rows of prompts, may draft and
            verify; none where steps decide.
        choice: chooses among them; None where there is nothing to choose.
        batches: increasing lane counts; the last one is all slots.
        columns: increasing page counts of a request.
        pieces: most pieces of prompts in a step.
        prompt_width: rows of a piece.
        steps: of a launch of so many lanes without prompts; one with them takes one.
        context: most tokens of prompt and answer together.
        dtype: of the caches.
    """

    weights: Weights
    roster: Roster
    config: StepConfig
    stepping: Callable[[StepConfig, int], StepConfig]
    tables: Callable[[int, int], CostTables]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    choice: ShapeChoice | None
    pool: PagePool
    batches: tuple[int, ...]
    columns: tuple[int, ...]
    pieces: int
    prompt_width: int
    steps: Callable[[int], int]
    context: int
    dtype: Any

    def __post_init__(self) -> None:
        self._launcher = ThreadPoolExecutor(1, "dspark-launcher")
        state = _START(
            self.config,
            slots=self.slots,
            pool=self.pool,
            context=self.context,
            dtype=self.dtype,
            stop_width=MAX_STOP_IDS,
        )
        self._weights, self._weights_tree = jax.tree.flatten(self.weights)
        self._state, self._state_tree = jax.tree.flatten(bound(state))
        self._places = keep_places(jax.default_backend(), self._state[0].sharding)
        nobody = self._begin([])
        self._admits = structure_of(self._state_tree, nobody.layout)
        change = functools.partial(_admitted, tree=self._state_tree, layout=nobody.layout)
        self._admit_places = touched(change, self._state, nobody.words)
        self._warm: dict[Needs, StepConfig] = {}
        self._statics: dict[tuple[StepConfig, int, int, int, Shape | None], dict[str, Any]] = {}
        self._lanes: tuple[Packed, Packed] | None = None
        self._newest: Packed | None = None

    @property
    def slots(self) -> int:
        """Requests decoded together."""
        return self.batches[-1]

    @cached_property
    def piece_tiers(self) -> tuple[int, ...]:
        """Pieces of prompts that a step is compiled for."""
        return piece_tiers(self.pieces)

    @cached_property
    def costs(self) -> dict[tuple[int, int], CostTables]:
        """Cost tables on the host, by lanes and pieces."""
        tiers = itertools.product(self.batches, (0, *self.piece_tiers))
        return {
            (batch, pieces): jax.device_get(self.tables(batch, pieces * self.prompt_width))
            for batch, pieces in tiers
        }

    @cached_property
    def _tables_tree(self) -> Any:
        return jax.tree.structure(next(iter(self.costs.values())))

    @cached_property
    def _priced(self) -> dict[tuple[int, int], list[jax.Array]]:
        """The same on the device, as lists."""
        return {program: self._placed_tables(tables) for program, tables in self.costs.items()}

    def _placed_tables(self, tables: CostTables) -> list[jax.Array]:
        return jax.device_put(jax.tree.leaves(tables))

    @cached_property
    def _in_use(self) -> dict[tuple[int, int], CostTables]:
        """`costs` as they have been corrected."""
        return dict(self.costs)

    def reprice(self, program: tuple[int, int], tables: CostTables) -> None:
        """Step by these costs from the next dispatch on. They are copied while others run."""
        self._in_use[program] = tables
        if self.choice is not None:
            return  # the host alone decides by them
        self._priced[program] = self._placed_tables(tables)

    def warm_up(self, params: Sequence[SamplingParams], progress: bool) -> None:
        """Compile every tier for requests like these."""
        needs = needs_of(params)
        config = self._warm[needs] = serving(self.config, needs)
        tiers = [
            (batch, columns, pieces, shape)
            for batch in self.batches
            for columns in self.columns
            for pieces in (0, *self.piece_tiers)
            for shape in self._shapes(batch, pieces) or (None,)
        ]

        def call(batch: int, columns: int, pieces: int, shape: Shape | None) -> Call:
            nobody = np.zeros(0, np.intp)
            at = lanes_of(nobody, nobody, np.zeros((0, columns), np.int32), batch, self.slots)
            return self._call(config, at, [], pieces, shape)

        def lowered(tier: tuple[int, int, int, Shape | None]) -> jax.stages.Lowered:
            program, *operands, static = call(*tier)
            return program.lower(self._weights, self._state, *operands, **static)

        def compile_and_run() -> None:
            self._admit(self._begin([]))
            begin = time.perf_counter()
            compile_together(map(lowered, tiers), progress)
            compiled = time.perf_counter()
            for tier in tiers * WARM_RUNS:
                self._launch(call(*tier))
            jax.block_until_ready(self._state)
            run = time.perf_counter() - compiled
            took = len(tiers), compiled - begin, run
            logger.info("%d programs: compiled in %.1f s, first runs in %.1f s", *took)

        self._launcher.submit(compile_and_run).result()
        self._lanes = None

    def dispatch(self, plan: Plan, least: float = 0.0) -> Flight:
        """Have a plan launched on the device and return at once.

        Args:
            least: seconds that a step takes at least, whatever it verifies: the host's.
        """
        roster, slots = self.roster, plan.slots
        sampled, filtered, logprobs = roster.needs[slots].max(axis=0).tolist()
        config = self._covering((bool(sampled), bool(filtered), logprobs))
        batch = _tier(self.batches, len(slots))
        columns = _tier(self.columns, int(roster.pages[slots].max()))
        lanes = slots if batch == self.slots else np.arange(len(slots))
        lane_of = np.zeros(self.slots, np.int32)
        lane_of[slots] = lanes
        at = lanes_of(lanes, slots, roster.table[slots, :columns], batch, self.slots)
        pieces = [(piece, lane_of[piece.sequence.slot]) for piece in plan.pieces]
        if self.choice is not None:
            for one in (*plan.starting, *plan.late):
                self.choice.begin(one.slot, one.most - one.rows, one.rows)
        legs: list[Leg] = []
        launches: list[tuple[list[Packed], Call]] = []

        def add(starting: list[Text], decoding: int, room: int, steps: int) -> None:
            """A leg in which the first so many decode."""
            shape = self._shape(slots[:decoding], batch, room, len(slots) - decoding, least)
            decodes: Any = np.zeros(batch, bool)
            decodes[lanes[:decoding]] = True
            own = Lanes(at.slots, decodes, at.table)
            call = self._call(config, own, pieces if room else [], room, shape)
            groups = [self._begin(one) for one in itertools.batched(starting, self._group)]
            legs.append(Leg(steps, room, shape))
            launches.append((groups, call))

        decoding, starting, left = len(plan.decoding), plan.starting, plan.steps
        # a single step is compiled with room for prompts alone
        if pieces or left < self.steps(batch):
            add(starting, decoding, _tier(self.piece_tiers, len(pieces)), 1)
            decoding, starting, left = decoding + len(plan.late), plan.late, left - 1
        if left:
            add(starting, decoding, 0, left)

        def launch() -> list[Packed]:
            reports = []
            for leg, (groups, call) in zip(legs, launches, strict=True):
                for group in groups:
                    self._admit(group)
                before, report = self._newest, self._launch(call)
                leg.ahead = before is not None and not _over(before)
                self._newest = report
                report.words.copy_to_host_async()
                reports.append(report)
            return reports

        launched = self._launcher.submit(launch)
        slots, lanes = slots[:decoding], lanes[:decoding]
        return Flight(plan, slots, roster.request[slots], lanes, launched, batch, legs)

    def _shapes(self, batch: int, pieces: int) -> tuple[Shape, ...]:
        """What a dispatch is compiled for: little beside an unusual count of pieces."""
        shapes = self.shapes(batch, pieces * self.prompt_width)
        usual = min(usual_pieces(batch, self.prompt_width), self.pieces)
        return shapes if pieces in (0, _tier(self.piece_tiers, usual)) else extremes(shapes)

    def _shape(
        self, slots: np.ndarray, batch: int, pieces: int, prefilling: int, least: float
    ) -> Shape | None:
        """What a leg drafts and verifies."""
        if self.choice is None:
            return None
        costs = self._in_use[batch, pieces]
        shapes = self._shapes(batch, pieces)
        return self.choice.choose(shapes, batch, costs, slots, prefilling=prefilling, least=least)

    @property
    def _group(self) -> int:
        return min(self.slots, START_GROUP)

    def _covering(self, wanted: Needs) -> StepConfig:
        """The leanest warmed-up step that can do this, or one of its own."""

        def serves(warm: Needs) -> bool:
            return all(have >= need for have, need in zip(warm, wanted, strict=True))

        leanest = min(filter(serves, self._warm), default=None)
        return serving(self.config, wanted) if leanest is None else self._warm[leanest]

    def _launch(self, call: Call) -> Packed:
        program, *operands, static = call
        self._state, report = program(self._weights, self._state, *operands, **static)
        return report

    def _call(
        self,
        config: StepConfig,
        placed: Lanes,
        pieces: list[tuple[Piece, int]],
        count: int,
        shape: Shape | None,
    ) -> Call:
        """A launch: a step with room for ``count`` pieces of prompts, or ``steps`` without."""
        batch, columns = placed.table.shape
        tables, lanes = self._priced[batch, count], self._on_device(placed)
        rows = pack(prompt_rows(pieces, count, self.prompt_width, batch)) if count else None
        key = config, batch, columns, count, shape
        if key not in self._statics:
            layout = None if rows is None else rows.layout
            parts = self._weights_tree, self._state_tree, self._tables_tree, lanes.layout, layout
            step = (
                self.stepping(config, batch)
                if shape is None
                else dataclasses.replace(config, shape=shape, walk_caps=())
            )
            self._statics[key] = {
                "structure": structure_of(*parts),
                "config": step,
                "steps": 1 if count else self.steps(batch),
            }
        words = None if rows is None else jax.device_put(rows.words)
        verified = batch * config.width if shape is None else shape.rows
        run = _run(verified + count * self.prompt_width)
        return run, tables, lanes.words, words, self._statics[key]

    def _on_device(self, placed: Lanes) -> Packed:
        """The same, copied only if it differs from what the last dispatch had."""
        packed, held = pack(placed), self._lanes
        if held is None or not _same(held[0], packed):
            held = self._lanes = packed, Packed(jax.device_put(packed.words), packed.layout)
        return held[1]

    def _admit(self, starting: Packed) -> None:
        rows = [self._state[place] for place in self._admit_places]
        rows = _admit(rows, starting.words, structure=self._admits, places=self._admit_places)
        for place, row in zip(self._admit_places, rows, strict=True):
            self._state[place] = row

    def _begin(self, sequences: Sequence[Text]) -> Packed:
        """These begin to decode, a group at most; on the device."""
        packed = pack(starting_of(sequences, self._group, self.roster, self.context))
        return Packed(jax.device_put(packed.words), packed.layout)


def _over(report: Packed) -> bool:
    words: Any = report.words
    return words.is_ready()


def _tier(tiers: tuple[int, ...], wanted: int) -> int:
    return next(tier for tier in tiers if tier >= wanted)


def _same(old: Packed, new: Packed) -> bool:
    return old.layout == new.layout and np.array_equal(old.words, new.words)
