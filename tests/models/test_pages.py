"""Rows are found through the page table, and what has no page has no place."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.models.pages import contiguous, locate, place


def test_a_contiguous_table_gives_every_slot_its_own_run_of_pages():
    np.testing.assert_array_equal(contiguous(2, 10, 4), [[0, 1, 2], [3, 4, 5]])


def test_a_row_is_found_in_the_page_its_table_names():
    table = jnp.asarray([[7, 2], [5, 0]])
    page, offset = locate(table, jnp.asarray([0, 0, 1, 1]), jnp.asarray([3, 4, 0, 7]), 4)
    np.testing.assert_array_equal(page, [7, 2, 5, 0])
    np.testing.assert_array_equal(offset, [3, 0, 0, 3])


def test_a_row_without_a_page_is_written_nowhere():
    table = jnp.asarray([[1, -1]])
    slot = jnp.asarray([0, 0, 0, 1, -1, 0])
    row = jnp.asarray([0, 4, 8, 0, 0, -1])
    page, offset = locate(table, slot, row, 4)
    pool = jnp.zeros((2, 4)).at[page, offset].set(1.0, mode="drop")
    np.testing.assert_array_equal(pool, [[0, 0, 0, 0], [1, 0, 0, 0]])


def test_without_a_table_a_slot_is_its_own_page():
    slot, row = jnp.asarray([0, 3]), jnp.asarray([5, 9])
    assert place(None, slot, row, 4) == (slot, row)
