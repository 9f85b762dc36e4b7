"""Pages are counted by their users, found again by what is before and in them, and never lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.engine.page_store import PageStore, next_key


def keys_of(*pages):
    found = []
    for tokens in pages:
        found.append(next_key(found[-1] if found else b"", tokens))
    return found


def test_a_key_names_the_whole_text_up_to_its_page():
    assert keys_of([1, 2], [3, 4]) == keys_of([1, 2], [3, 4])
    assert keys_of([1, 2], [3, 4])[1] != keys_of([9, 2], [3, 4])[1]
    assert keys_of([1, 2])[0] != keys_of([2, 1])[0]


def test_a_released_page_is_found_again_until_its_place_is_needed():
    store = PageStore(3)
    keys = keys_of([1], [2])
    pages = store.take(2)
    for page, key in zip(pages, keys, strict=True):
        store.remember(page, key)
    store.release(pages)
    assert store.free == 3
    assert store.known(keys) == pages
    store.take(2)  # one blank page, and one that was known
    assert store.known(keys) == pages[:1], "the tail of a text goes before its head"


def test_a_shared_page_stays_until_its_last_user_leaves():
    store = PageStore(2)
    (page,) = store.take(1)
    store.remember(page, keys_of([1])[0])
    store.share([page])
    store.release([page])
    assert store.free == 1
    store.release([page])
    assert store.free == 2


def test_a_run_of_known_pages_ends_at_the_first_unknown():
    store = PageStore(4)
    keys = keys_of([1], [2], [3])
    pages = store.take(3)
    store.remember(pages[0], keys[0])
    store.remember(pages[2], keys[2])
    assert store.known(keys) == pages[:1]


def test_the_first_page_of_a_key_keeps_it():
    store = PageStore(2)
    first, second = store.take(2)
    key = keys_of([1])[0]
    store.remember(first, key)
    store.remember(second, key)
    assert store.known([key]) == [first]


def test_pages_that_are_not_there_are_not_given():
    store = PageStore(2)
    with pytest.raises(ValueError, match="3 pages are wanted and 2 free"):
        store.take(3)
    assert store.free == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_every_page_is_free_or_used_whatever_happens(moves):
    store, texts = PageStore(8), []
    for move, value in moves:
        if move == 0:
            keys = keys_of(*([value, n] for n in range(1 + value % 3)))
            shared = store.known(keys)
            wanted = len(keys) - len(shared)
            if wanted + store.unused(shared) <= store.free:
                store.share(shared)
                texts.append((shared + store.take(wanted), keys))
        elif texts:
            pages, keys = texts[value % len(texts)]
            if move == 1:
                for page, key in zip(pages, keys, strict=True):
                    store.remember(page, key)
            elif move == 2:
                texts.remove((pages, keys))
                store.release(pages)
        used = {page for pages, _ in texts for page in pages}
        assert store.free == 8 - len(used)
    for pages, _ in texts:
        store.release(pages)
    assert sorted(store.take(8)) == list(range(8))
