"""What the host knows of the requests in slots, kept in arrays."""

import numpy as np
import pytest

from dspark_jax.decode.job import Job
from dspark_jax.decode.request import SamplingParams
from dspark_jax.engine.roster import Roster, slots_of
from dspark_jax.engine.sequence import Sequence
from dspark_jax.models.pages import PagePool

SLOTS, WIDTH = 4, 3


def seated(roster, slot, prompt, index=0, **params):
    sequence = Sequence(Job(index, tuple(prompt), SamplingParams(**params), 0, ()), context=32)
    roster.seat(sequence, slot)
    return sequence


@pytest.fixture
def roster():
    return Roster(SLOTS, PagePool(16, 4, 8))


def outcome(count, lanes):
    """Steps that brought so many tokens, which say their step, lane and place."""
    count = np.asarray(count)
    tokens = 100 * np.arange(len(count))[:, None, None] + 10 * np.arange(lanes)[:, None]
    return tokens + np.arange(WIDTH), count + 1, count - 1, count


def test_steps_are_told_apart_from_each_other_and_from_those_of_other_lanes(roster):
    one, other = seated(roster, 2, [5, 6]), seated(roster, 0, [7])
    count = [[2, 0, 3], [1, 0, 0], [2, 0, 1]]
    roster.extend(np.array([2, 0]), np.array([0, 2]), *outcome(count, 3))
    assert one.tokens == [0, 1, 100, 200, 201]
    assert one.records == [[3, 2, 3], [1, 0, 1], [2, 1, 2]]
    assert other.tokens == [20, 21, 22, 220]
    assert other.records == [[4, 2], [2, 0], [3, 1]], "a step that brought nothing is none"
    roster.extend(np.array([2]), np.array([1]), *outcome([[1, 1, 1]], 3))
    assert one.text(1, one.rows + 1) == [6, 0, 1, 100, 200, 201, 10]
    assert len(other.tokens) == 4, "another request has the lane"


def test_a_slot_forgets_who_has_left_it(roster):
    first = seated(roster, 1, [1, 2, 3], index=4)
    roster.extend(np.array([1]), np.array([0]), *outcome([[3]], 1))
    roster.own(1, [8, 9])
    roster.expect(np.array([1]), np.array([0.5]))
    in_flight = np.array([1]), np.array([4])
    assert roster.here(*in_flight).all()
    roster.free(first)
    assert (first.slot, first.tokens, first.pages, first.expected) == (-1, [], [], None)
    second = seated(roster, 1, [6], index=5)
    assert not roster.here(*in_flight).any(), "what is in flight was not for it"
    assert (second.tokens, second.rows, second.pages, second.expected) == ([], 0, [], None)


def test_pages_are_given_to_many_in_order(roster):
    sequences = [seated(roster, slot, [1], index=9 - slot) for slot in (3, 0, 1)]
    roster.own(3, [7])
    roster.give(slots_of(sequences), np.array([2, 0, 1]), [4, 5, 6])
    assert [one.pages for one in sequences] == [[7, 4, 5], [], [6]]
    roster.own(3, [2])
    assert roster.table[3].tolist() == [2, *[-1] * 7]


def test_the_oldest_that_decode_come_first(roster):
    for slot, index in ((0, 7), (1, 3), (2, 5)):
        seated(roster, slot, [1], index=index)
    roster.decoding[[0, 1, 2]] = True, True, False
    assert roster.order().tolist() == [1, 0]


def test_expected_drafts_add_up_from_the_first_that_are_known(roster):
    one, other = seated(roster, 0, [1]), seated(roster, 1, [1])
    for _ in range(2):
        roster.expect(np.array([0]), np.array([0.75]))
    assert (one.expected, other.expected) == (1.5, None)


@pytest.mark.parametrize(
    ("params", "needs", "watched"),
    [
        ({}, [0, 0, -1], False),
        ({"temperature": 0.5}, [1, 0, -1], False),
        ({"top_k": 5}, [0, 0, -1], False),
        ({"temperature": 0.5, "top_p": 0.9}, [1, 1, -1], False),
        ({"logprobs": 0}, [0, 0, 0], True),
        ({"stop": ("x",)}, [0, 0, -1], True),
    ],
)
def test_what_a_request_needs_of_a_step_is_known(roster, params, needs, watched):
    seated(roster, 0, [1], **params)
    assert roster.needs[0].tolist() == needs
    assert roster.watched[0] == watched
