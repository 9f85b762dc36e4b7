"""What a launch takes besides weights and state, as the host fills it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.decode.request import MAX_STOP_IDS
from dspark_jax.decode.state import Requests
from dspark_jax.engine.lanes import Lanes, Pieces, Starting
from dspark_jax.engine.roster import Roster, slots_of
from dspark_jax.engine.scheduler import Piece
from dspark_jax.engine.sequence import Sequence as Text


def lanes_of(
    lanes: np.ndarray, slots: np.ndarray, pages: np.ndarray, batch: int, every: int
) -> Lanes:
    """Lanes of which none decodes yet.

    Args:
        lanes: ``[n]`` those that are taken, out of ``batch``.
        slots, pages: ``[n]``, ``[n, C]`` who takes them.
        every: slots that there are; where all have a lane, lane s is slot s.
    """
    slot: Any = np.full(batch, every, np.int32)
    decoding: Any = np.zeros(batch, bool)
    table: Any = np.full((batch, pages.shape[1]), -1, np.int32)
    slot[lanes], table[lanes] = slots, pages
    return Lanes(None if batch == every else slot, decoding, table)


def prompt_rows(pieces: Sequence[tuple[Piece, int]], count: int, width: int, batch: int) -> Pieces:
    """``count`` pieces of ``width`` rows, the first of them these.

    Args:
        pieces: with the lane of each.
        batch: lanes; the rows of missing pieces are beyond them.
    """
    tokens = np.zeros((count, width), np.int32)
    lane = np.full(count, batch, np.int32)
    start, rows = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for index, (piece, at) in enumerate(pieces):
        tokens[index, : len(piece.tokens)] = piece.tokens
        lane[index], start[index], rows[index] = at, piece.start, len(piece.tokens)
    return Pieces(tokens, lane, start, rows)  # pyright: ignore[reportArgumentType]


def starting_of(sequences: Sequence[Text], size: int, roster: Roster, context: int) -> Starting:
    """Prefilled sequences that begin to decode; what they emitted before counts as emitted.

    Args:
        sequences: at most ``size``; what is missing has a slot beyond the last.
        roster: who has which slot.
        context: most tokens of prompt and answer together.
    """
    slots = slots_of(sequences)
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
    return Starting(
        slots=column(slots, np.int32, len(roster.rows)),
        anchor=column(roster.texts[slots, roster.rows[slots]], np.int32),
        rows=column(roster.rows[slots], np.int32),
        steps=column(roster.steps[slots], np.int32),
        emitted=column(roster.rows[slots] + 1 - [one.prompt_rows for one in sequences], np.int32),
        seeds=asked_for("seed", np.uint32),
        requests=Requests(
            temperature=asked_for("temperature", np.float32),
            top_k=asked_for("top_k", np.int32),
            top_p=asked_for("top_p", np.float32),
            seed=np.zeros((size, 2), np.uint32),  # pyright: ignore[reportArgumentType]
            max_new_tokens=asked_for("max_new_tokens", np.int32),
            context=column(context, np.int32),
            stop_ids=stop_ids,
        ),
    )
