"""The compiled programs of an engine, one a tier, all warmed up before the first request."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dspark_jax.compiling import compile_together, jit_for_rows
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.request import MAX_STOP_IDS, SamplingParams
from dspark_jax.decode.setup import Needs, needs_of, serving
from dspark_jax.decode.state import Requests
from dspark_jax.decode.step import Weights
from dspark_jax.engine import lanes as on_device
from dspark_jax.engine.config import piece_tiers, usual_pieces
from dspark_jax.engine.lanes import Lanes, Pieces, Report, Starting
from dspark_jax.engine.leaves import Structure, structure_of, touched
from dspark_jax.engine.packing import Layout, Packed, pack, unpack
from dspark_jax.engine.roster import Roster, slots_of
from dspark_jax.engine.scheduler import Piece, Plan
from dspark_jax.engine.sequence import Sequence as Text
from dspark_jax.engine.shapes import ShapeChoice, extremes
from dspark_jax.models.pages import PagePool
from dspark_jax.schedule.cost import CostTables

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
class Leg:
    """One launch of a dispatch.

    Attributes:
        steps: that it takes.
        pieces: pieces of prompts it was compiled for.
        shape: what its steps draft and verify; None where they decide it themselves.
        ended: when the host has seen it end, seconds on the engine's clock; None until it is read.
        waited: whether the host was waiting for it then, so that ``ended`` is no later.
    """

    steps: int
    pieces: int
    shape: Shape | None
    ended: float | None = None
    waited: bool = False


@dataclasses.dataclass
class Flight:
    """A dispatch that may still be running.

    Attributes:
        plan: what was asked for.
        slots, requests, lanes: ``[n]`` of those that decode in it: their slots, arrival numbers and
            lanes.
        launched: what the steps of each leg did, on the device, when all have been launched there.
        batch: lanes it was compiled for.
        legs: in the order they run.
        sent: when it was dispatched, seconds on the engine's clock.
    """

    plan: Plan
    slots: np.ndarray
    requests: np.ndarray
    lanes: np.ndarray
    launched: Future[list[Packed]]
    batch: int
    legs: list[Leg]
    sent: float = 0.0

    def wait(self, clock: Callable[[], float]) -> None:
        """Return when it has ended.

        Raises:
            Exception: what went wrong on the device.
        """
        if self.legs[-1].ended is not None:
            return
        launched = self.launched.done()
        for leg, report in zip(self.legs, self.launched.result(), strict=True):
            words: Any = report.words
            leg.waited = not (launched and words.is_ready())
            words.block_until_ready()
            leg.ended = clock()
            launched = True

    def read(self) -> Report:
        """Its outcomes on the host; it has been waited for."""
        packed = self.launched.result()
        words = jax.device_get([one.words for one in packed])
        layouts = [one.layout for one in packed]
        reports = [unpack(Packed(*one)) for one in zip(words, layouts, strict=True)]
        if len(reports) == 1:
            return reports[0]
        return jax.tree.map(lambda *legs: np.concatenate(legs), *reports)


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
        self._state, self._state_tree = jax.tree.flatten(state)
        nobody = self._starting([])
        self._admits = structure_of(self._state_tree, nobody.layout)
        change = functools.partial(_admitted, tree=self._state_tree, layout=nobody.layout)
        self._admit_places = touched(change, self._state, nobody.words)
        self._warm: dict[Needs, StepConfig] = {}
        self._statics: dict[tuple[StepConfig, int, int, int, Shape | None], dict[str, Any]] = {}
        self._lanes: tuple[Packed, Packed] | None = None

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
            placed = _placed(nobody, nobody, np.zeros((0, columns), np.int32), batch, self.slots)
            return self._call(config, placed, [], pieces, shape)

        def lowered(tier: tuple[int, int, int, Shape | None]) -> jax.stages.Lowered:
            program, *operands, static = call(*tier)
            return program.lower(self._weights, self._state, *operands, **static)

        def compile_and_run() -> None:
            self._admit(self._starting([]))
            compile_together(map(lowered, tiers), progress)
            for tier in tiers * WARM_RUNS:
                self._launch(call(*tier))
            jax.block_until_ready(self._state)

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
        placed = _placed(lanes, slots, roster.table[slots, :columns], batch, self.slots)
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
            own = Lanes(placed.slots, decodes, placed.table)
            call = self._call(config, own, pieces if room else [], room, shape)
            groups = [self._starting(one) for one in itertools.batched(starting, self._group)]
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
            for groups, call in launches:
                for group in groups:
                    self._admit(group)
                reports.append(self._launch(call))
                reports[-1].words.copy_to_host_async()
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
        rows = pack(self._rows(pieces, count, batch)) if count else None
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

    def _rows(self, pieces: list[tuple[Piece, int]], count: int, batch: int) -> Pieces:
        tokens = np.zeros((count, self.prompt_width), np.int32)
        lane = np.full(count, batch, np.int32)
        start, rows = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for index, (piece, at) in enumerate(pieces):
            tokens[index, : len(piece.tokens)] = piece.tokens
            lane[index], start[index], rows[index] = at, piece.start, len(piece.tokens)
        return Pieces(tokens, lane, start, rows)  # pyright: ignore[reportArgumentType]

    def _admit(self, starting: Packed) -> None:
        rows = [self._state[place] for place in self._admit_places]
        rows = _admit(rows, starting.words, structure=self._admits, places=self._admit_places)
        for place, row in zip(self._admit_places, rows, strict=True):
            self._state[place] = row

    def _starting(self, sequences: Sequence[Text]) -> Packed:
        """Prefilled sequences that begin to decode; what they emitted before counts as emitted."""
        size, slots, roster = self._group, slots_of(sequences), self.roster
        asked = [one.job.admission(one.slot) for one in sequences]

        def column(values: Any, dtype: Any, padding: Any = 0) -> Any:
            padded = np.full(size, padding, dtype)
            padded[: len(asked)] = values
            return padded

        def asked_for(name: str, dtype: Any) -> Any:
            return column([getattr(one, name) for one in asked], dtype)

        stop_ids: Any = np.full((size, MAX_STOP_IDS), -1, np.int32)
        for row, admission in enumerate(asked):
            stop_ids[row, : len(admission.stop_ids)] = admission.stop_ids
        starting = Starting(
            slots=column(slots, np.int32, self.slots),
            anchor=column(roster.texts[slots, roster.rows[slots]], np.int32),
            rows=column(roster.rows[slots], np.int32),
            steps=column(roster.steps[slots], np.int32),
            emitted=column(
                roster.rows[slots] + 1 - [one.prompt_rows for one in sequences], np.int32
            ),
            seeds=asked_for("seed", np.uint32),
            requests=Requests(
                temperature=asked_for("temperature", np.float32),
                top_k=asked_for("top_k", np.int32),
                top_p=asked_for("top_p", np.float32),
                seed=np.zeros((size, 2), np.uint32),  # pyright: ignore[reportArgumentType]
                max_new_tokens=asked_for("max_new_tokens", np.int32),
                context=column(self.context, np.int32),
                stop_ids=stop_ids,
            ),
        )
        packed = pack(starting)
        return Packed(jax.device_put(packed.words), packed.layout)


def _placed(
    lanes: np.ndarray, slots: np.ndarray, pages: np.ndarray, batch: int, every: int
) -> Lanes:
    """Lanes on the host, of which none decodes yet: those of ``every`` slots, or of some."""
    slot: Any = np.full(batch, every, np.int32)
    decoding: Any = np.zeros(batch, bool)
    table: Any = np.full((batch, pages.shape[1]), -1, np.int32)
    slot[lanes], table[lanes] = slots, pages
    return Lanes(None if batch == every else slot, decoding, table)


def _tier(tiers: tuple[int, ...], wanted: int) -> int:
    return next(tier for tier in tiers if tier >= wanted)


def _same(old: Packed, new: Packed) -> bool:
    return old.layout == new.layout and np.array_equal(old.words, new.words)
