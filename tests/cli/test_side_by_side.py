"""The comparison behind `dspark demo`."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.cli import demo
from dspark_jax.cli.side_by_side import (
    Answer,
    Pair,
    accepted_length,
    comparison_table,
    first_difference,
    tokens_per_second,
)
from dspark_jax.testing.markov import MarkovTargetConfig, MarkovTargetWeights


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1], 1),
    ],
)
def test_the_first_difference_is_a_token_or_the_shorter_end(left, right, index):
    assert first_difference(left, right) == index


def test_rates_weigh_every_token_and_not_every_answer():
    answers = [Answer((1,) * 30, 1.0, 10), Answer((1,) * 10, 3.0, 10)]
    assert tokens_per_second(answers) == pytest.approx(10.0)
    assert accepted_length(answers) == pytest.approx(2.0)


def test_the_table_has_a_row_a_category_and_one_for_all():
    def pair(category: str, seconds: float) -> Pair:
        plain = Answer((1,) * 20, 2.0, 20)
        return Pair(category, plain, Answer((1,) * 20, seconds, 8))

    table = comparison_table([pair("code", 1.0), pair("facts", 2.0), pair("code", 1.0)])
    page = io.StringIO()
    Console(width=100, file=page).print(table)
    lines = page.getvalue().splitlines()
    (code,) = [line for line in lines if "code" in line]
    (facts,) = [line for line in lines if "facts" in line]
    (everything,) = [line for line in lines if " all " in line]
    assert "2.00x" in code
    assert "1.00x" in facts
    assert "1.50x" in everything
    assert "2.50" in everything


def test_a_cpu_drafts_no_more_than_its_quick_products_hold(monkeypatch):
    assert demo.default_k(7) == 3
    assert demo.default_k(2) == 2
    monkeypatch.setattr(demo.jax, "default_backend", lambda: "gpu")
    assert demo.default_k(7) == 7


def test_the_logits_where_answers_part_are_those_after_the_text_before():
    table = jax.random.normal(jax.random.key(0), (9, 9))
    target = LoadedTarget(MarkovTargetConfig(9), MarkovTargetWeights(table), None, (), "markov")  # type: ignore
    np.testing.assert_allclose(demo.next_logits(target, [4, 7, 2], 8), table[2], rtol=1e-6)
