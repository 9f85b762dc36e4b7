"""Stop strings in text that arrives in pieces of any kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decode.stops import StopAwareStream, find_stop, undecided
from dspark_jax.text.stream import TextStream


def decode(ids):
    """Tokens are single bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


TEXTS = st.text(alphabet="abé€😀", max_size=12)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2)


@settings(deadline=None)
@given(TEXTS, STOPS)
def test_the_stop_that_is_completed_first_ends_the_answer(text, stops):
    ids = list(text.encode())
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    found = find_stop(decode, ids, stops)
    if not ends:
        assert found is None
        return
    count, before = found
    end = min(ends)
    assert count == len(text[:end].encode())
    assert before == text[: min(end - len(s) for s in stops if text[:end].endswith(s))]
    assert not any(stop in before for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [
        ("abc", ["cd"], 1),
        ("abc", ["bcd", "cx"], 2),
        ("abc", ["abc"], 0),  # complete: nothing is left to decide
        ("abc", ["x"], 0),
        ("", ["x"], 0),
        ("aab", ["aabb"], 3),
    ],
)
def test_text_that_may_become_a_stop_is_undecided(text, stops, length):
    assert undecided(text, stops) == length


@settings(deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(1, 5), min_size=1))
def test_a_stream_shows_the_final_text_and_never_more(text, stops, sizes):
    ids = list(text.encode())
    found = find_stop(decode, ids, stops)
    final = text if found is None else found[1]
    shown: list[str] = []
    stream = StopAwareStream(shown.append, TextStream(decode), stops)
    seen = 0
    for size in sizes:
        seen += size
        if find_stop(decode, ids[:seen], stops):
            break
        stream.update(ids[:seen])
        assert final.startswith("".join(shown))
        assert "\ufffd" not in "".join(shown)
    stream.finish(final)
    assert "".join(shown) == final
    assert "" not in shown
