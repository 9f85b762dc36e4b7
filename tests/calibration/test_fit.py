"""All three fits find temperatures that are known, shrink where they cannot, and stay in range."""

import functools

import numpy as np
import pytest

from dspark_jax.calibration.blocks import VerifiedBlocks, cumulative_survival
from dspark_jax.calibration.gradient import fit_gradient
from dspark_jax.calibration.metrics import expected_calibration_error
from dspark_jax.calibration.online import fit_online
from dspark_jax.calibration.quality import measure
from dspark_jax.calibration.sts import GRID, HIGHEST, LOWEST, fit_grid

pytestmark = pytest.mark.optimized

# Numbers of blocks come again below: each is a program of its own for the fits by gradient.
TRUE = (2.0, 0.5, 1.0, 1.4)
FITS = {
    "grid": fit_grid,
    "nll": functools.partial(fit_gradient, loss="nll"),
    "brier": functools.partial(fit_gradient, loss="brier"),
    "online": fit_online,
}


@pytest.fixture(scope="module", params=list(FITS))
def fit(request):
    return FITS[request.param]


@pytest.fixture(scope="module")
def fitted(fit, synthetic):
    """What a fit makes of many blocks; the best of a grid scatters more than a smooth minimum."""
    smooth = fit in (FITS["nll"], FITS["brier"])
    return fit(synthetic(TRUE, 30_000 if smooth else 60_000))


def test_known_temperatures_are_recovered(fitted):
    np.testing.assert_allclose(fitted.temperatures, TRUE, rtol=0.12)
    assert not fitted.shrunk.any()


def test_a_temperature_of_two_is_recovered_from_twenty_thousand_blocks(synthetic):
    found = fit_grid(synthetic((2.0,), 20_000))
    assert 1.8 <= found.temperatures[0] <= 2.2


def test_the_calibration_error_falls_at_every_position(fitted, synthetic):
    held_out = synthetic(TRUE, 60_000, seed=1)
    for figures in measure(held_out, fitted.temperatures):
        assert figures.ece_after < 0.015
        assert figures.ece_after <= figures.ece_before + 0.003


def test_the_grid_takes_the_best_of_its_points_given_the_positions_before(synthetic):
    blocks = synthetic(TRUE, 3000)
    found = fit_grid(blocks).temperatures
    for position in range(4):
        errors = []
        for temperature in GRID:
            tried = np.array([*found[:position], temperature, *found[position + 1 :]])
            product = cumulative_survival(blocks.logits, tried)[:, position]
            label = blocks.accepted > position
            errors.append(expected_calibration_error(product, label))
        assert GRID[np.argmin(errors)] == pytest.approx(found[position])


def test_a_later_position_makes_up_for_what_an_earlier_one_left(synthetic):
    """The event is cumulative: with position 1 held at 1, position 2 leans the other way."""
    random = np.random.default_rng(0)
    logits = np.stack([np.full(40_000, 2.0), 1 + random.normal(size=40_000)], axis=1)
    held = 1 / (1 + np.exp(-2.0))
    first = random.uniform(size=40_000) < held**2
    second = first & (random.uniform(size=40_000) < 1 / (1 + np.exp(-logits[:, 1])))
    blocks = VerifiedBlocks(logits, np.where(second, 2, first), np.full(40_000, 2))
    alone = fit_grid(blocks, minimum=0).temperatures
    assert alone == pytest.approx([GRID[np.argmin(abs(GRID - 1.79))], 1.0], abs=0.2)


def test_positions_that_few_blocks_reach_keep_temperature_one(fit, synthetic):
    blocks = synthetic((2.0, 2.0, 2.0), 900, shift=-1.0)
    reached = blocks.reached.sum(axis=0)
    assert reached[0] == 900
    assert reached[1] < 500
    found = fit(blocks)
    assert found.shrunk.tolist() == [False, True, True]
    assert found.temperatures[0] != 1.0
    assert found.temperatures[1:].tolist() == [1.0, 1.0]


def test_no_block_at_all_is_the_identity(fit):
    found = fit(VerifiedBlocks(np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int)))
    assert found.temperatures.tolist() == [1.0, 1.0, 1.0]
    assert found.shrunk.all()


@pytest.mark.parametrize("accepted", [0, 3])
def test_labels_of_one_kind_give_temperatures_inside_the_range(fit, accepted):
    logits = np.random.default_rng(0).normal(size=(900, 3))
    blocks = VerifiedBlocks(logits, np.full(900, accepted), np.full(900, 3))
    found = fit(blocks)
    assert (found.temperatures >= LOWEST).all()
    assert (found.temperatures <= HIGHEST).all()


def test_positions_without_a_label_do_not_move_the_fit(fit, synthetic):
    """Cut blocks are all rejections behind the cut; as labels they would pull down."""
    whole = synthetic(TRUE, 15_000)
    extra = synthetic(TRUE, 15_000, seed=2)
    cut = VerifiedBlocks(
        np.concatenate([whole.logits, extra.logits]),
        np.concatenate([whole.accepted, np.minimum(extra.accepted, 1)]),
        np.concatenate([whole.verified, np.ones(15_000, int)]),
    )
    np.testing.assert_allclose(fit(cut).temperatures[1:], TRUE[1:], rtol=0.25)


def test_the_online_fit_of_a_stationary_stream_is_the_grid_fit(synthetic):
    blocks = synthetic(TRUE, 100_000)
    online, grid = fit_online(blocks).temperatures, fit_grid(blocks).temperatures
    np.testing.assert_allclose(online, grid, rtol=0.12)
