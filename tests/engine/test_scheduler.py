"""Who runs when, decided on the host: no device is asked in any of these."""

import numpy as np
import pytest

from dspark_jax.decode.job import Job
from dspark_jax.decode.request import SamplingParams
from dspark_jax.engine.scheduler import Scheduler
from dspark_jax.engine.sequence import Sequence, Stage
from dspark_jax.models.pages import PagePool

WIDTH = 4


def scheduler(pages=8, slots=4, pieces=2, page_size=4, **changes):
    given = {"width": WIDTH, "prompt_width": 4, "steps": lambda requests: 3, "prefix_reuse": True}
    options = given | changes
    return Scheduler(
        PagePool(pages, page_size, 32 // page_size), slots=slots, pieces=pieces, **options
    )


def sequence(index, prompt, max_new_tokens=20):
    prompt = tuple(prompt)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Sequence(Job(index, prompt, params, 0, ()), context=32)


def emit(queue, sequence, plan, *tokens):
    """What reading a dispatch does to a sequence: one step brought all."""
    count = np.array([[len(tokens)]])
    slots = np.array([sequence.slot])
    queue.roster.extend(slots, np.array([0]), np.array([[tokens]]), count - 1, count - 1, count)
    queue.roster.in_flight[slots] -= plan.steps


def test_those_that_take_part_decide_how_many_steps_a_dispatch_has():
    queue = scheduler(pages=24, steps=lambda requests: 10 - requests)
    for index in range(2):
        queue.add(sequence(index, [5]))
    assert queue.plan().steps == 8
    queue.add(sequence(2, range(3)))
    assert queue.plan().steps == 8, "three take part, and a step with a prompt comes first"


def test_a_prompt_is_read_in_pieces_beside_those_that_decode():
    queue = scheduler(pages=24)
    short, long = sequence(0, [5]), sequence(1, range(10))
    queue.add(short)
    queue.add(long)
    first = queue.plan()
    assert first.decoding == [short], "the last token of a prompt is not prefilled"
    assert [(piece.start, piece.tokens) for piece in first.pieces] == [
        (0, [0, 1, 2, 3]),
        (4, [4, 5, 6, 7]),
    ]
    assert first.steps == 4, "a step with the pieces, and three"
    second = queue.plan()
    assert (second.decoding, second.late) == ([short], [long])
    assert [(piece.start, piece.tokens) for piece in second.pieces] == [(8, [8])]
    third = queue.plan()
    assert not third.starting, "the steps after its last piece were its first"
    assert third.decoding == [short, long]
    assert not third.pieces


def test_prompts_are_read_in_a_step_of_their_own_before_the_others():
    queue = scheduler(pages=24)
    short = sequence(0, [5, 6])
    queue.add(short)
    first = queue.plan()
    assert (first.steps, first.decoding, first.late) == (4, [], [short])
    assert first.slots.tolist() == [short.slot], "once, though it reads and decodes"
    assert queue.plan().steps == 3
    queue.add(sequence(1, [1, 2, 3]))
    assert queue.plan().steps == 4


def test_while_prompts_fill_one_step_after_the_other_nobody_waits_for_more_of_them():
    queue = scheduler(pages=24, pieces=2)
    queue.add(sequence(0, [5]))
    queue.add(sequence(1, range(20)))
    plans = [queue.plan() for _ in range(4)]
    assert [(len(plan.pieces), plan.steps) for plan in plans] == [(2, 1), (2, 4), (1, 4), (0, 3)]


def test_who_will_have_ended_takes_part_in_nothing_more():
    """A step emits a token at least, so four tokens last four steps at most."""
    queue = scheduler(pages=40)
    short, long = sequence(0, [5], 4), sequence(1, [6], 9)
    queue.add(short)
    queue.add(long)
    plans = [queue.plan() for _ in range(4)]
    assert [plan and (plan.steps, plan.decoding) for plan in plans] == [
        (3, [short, long]),
        (3, [short, long]),
        (3, [long]),
        None,
    ]


def test_the_newest_request_makes_room_and_waits_for_its_last_tokens():
    queue = scheduler(pages=5, prefix_reuse=False)
    old, new = sequence(0, [1] * 4), sequence(1, [2] * 4)
    queue.add(old)
    queue.add(new)
    queue.plan()
    plan = queue.plan()
    assert plan.decoding == [old, new]
    emit(queue, old, plan, 3, 3, 3, 3)
    emit(queue, new, plan, 4, 4, 4, 4)
    plan = queue.plan()
    assert plan.decoding == [old]
    assert new.stage is Stage.WAITING
    assert queue.preemptions == 1
    assert new.tokens == [4, 4, 4, 4]
    assert new.pages == []


def test_a_preempted_request_is_not_rejoined_before_its_newest_tokens_are_read():
    queue = scheduler(pages=6, prefix_reuse=False)
    old, new = sequence(0, [1] * 4), sequence(1, [2] * 4)
    queue.add(old)
    queue.add(new)
    queue.plan()
    unread = queue.plan()
    queue.plan()
    while new.stage is not Stage.WAITING:
        queue.plan()
    queue.leave(old)
    old.stage = Stage.DONE
    assert queue.plan() is None
    emit(queue, new, unread, 9)
    queue.roster.in_flight[:] = 0
    (piece, *_) = queue.plan().pieces
    assert piece.tokens == [2, 2, 2, 2], "prompt and answer are computed again"
    assert new.rows == 4


def test_a_known_prefix_is_not_prefilled_again():
    queue = scheduler(pieces=9)
    text = list(range(9))
    first = sequence(0, text)
    queue.add(first)
    queue.plan()
    queue.leave(first)
    first.stage = Stage.DONE
    same, other = sequence(1, text), sequence(2, [*text[:4], 30, 31, 32, 33, 34])
    queue.add(same)
    queue.add(other)
    plan = queue.plan()
    assert plan.starting == [same], "all its full pages are known, and 8 rows fill them"
    assert [(piece.sequence, piece.start) for piece in plan.pieces] == [(other, 4)]
    assert same.pages[0] == other.pages[0]


def run(queue, dispatches=40):
    """Plans, read as they are made, until nobody reads a prompt; pieces by request, in order."""
    pieces = []
    for _ in range(dispatches):
        plan = queue.plan()
        queue.roster.in_flight[:] = 0
        pieces.append([(p.sequence.arrival, p.start) for p in plan.pieces] if plan else [])
        if not queue.waiting and not pieces[-1]:
            return pieces[:-1]
    raise AssertionError("somebody waits for ever")


def test_a_prefix_that_an_older_request_is_reading_is_waited_for():
    queue = scheduler(pages=24)
    text = list(range(16))
    for index, tail in enumerate(([40, 41], [42, 43], [44, 45])):
        queue.add(sequence(index, [*text, *tail]))
    queue.add(sequence(3, [60, 61, 62]))
    read = run(queue)
    # four shared pages of two pieces a step, read once, then every request's own rows
    assert read == [[(0, 0), (0, 4)], [(0, 8), (0, 12)], [(0, 16), (1, 16)], [(2, 16), (3, 0)]]
    assert queue.reused_rows == 2 * 16
    assert len({one.pages[3] for one in queue.running[:3]}) == 1


def test_a_shorter_prefix_is_waited_for_and_no_longer_than_it_takes():
    queue = scheduler(pages=24)
    queue.add(sequence(0, range(20)))
    queue.add(sequence(1, [*range(4), *range(30, 35)]))
    read = run(queue)
    # one plan for the page that both begin with; the rest of the longer prompt is not waited for
    assert read[0] == [(0, 0), (0, 4)]
    assert [request for dispatch in read for request, _ in dispatch].count(1) == 1
    assert queue.reused_rows == 4


def test_nobody_waits_for_a_prefix_whose_reader_has_gone():
    queue = scheduler(pages=24, pieces=1)
    first, second = (sequence(index, range(12)) for index in range(2))
    queue.add(first)
    queue.add(second)
    assert [piece.sequence for piece in queue.plan().pieces] == [first]
    queue.leave(first)
    first.stage = Stage.DONE
    (piece,) = queue.plan().pieces
    assert (piece.sequence, piece.start) == (second, 4)


def test_without_reuse_nobody_waits_for_a_prefix():
    queue = scheduler(pages=24, pieces=9, prefix_reuse=False)
    for index in range(2):
        queue.add(sequence(index, range(9)))
    assert {piece.sequence.arrival for piece in queue.plan().pieces} == {0, 1}


def test_reuse_can_be_switched_off():
    queue = scheduler(pieces=9, prefix_reuse=False)
    for index in range(2):
        again = sequence(index, range(9))
        queue.add(again)
        assert queue.plan().pieces[0].start == 0
        queue.leave(again)
        again.stage = Stage.DONE


def test_older_requests_are_served_first():
    queue = scheduler(slots=1)
    late, early = sequence(5, [1]), sequence(2, [1])
    queue.add(late)
    queue.add(early)
    assert queue.plan().decoding == [early]


@pytest.mark.parametrize(("max_new_tokens", "rows"), [(1, 4), (3, 6), (20, 15)])
def test_no_page_is_kept_for_rows_that_cannot_come(max_new_tokens, rows):
    queue = scheduler(pages=24, page_size=1, steps=lambda requests: 2, prompt_width=8)
    short = sequence(0, [1] * 4, max_new_tokens)
    queue.add(short)
    assert queue.plan().steps == 3
    assert len(short.pages) == rows
