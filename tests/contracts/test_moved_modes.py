"""Moved draws of posteriors with separate modes: which there are, how much each weighs, and the marginal likelihood."""

import itertools

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp

import pymc_ngvi

from pymc_ngvi import fit_ngvi
from pymc_ngvi.core.climbs import ascend, tops
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.moves import posterior as rounds
from pymc_ngvi.moves.chains import Basins, ChainCoordinates, basins_among
from pymc_ngvi.moves.posterior import N_STARTS, MovedChecks, MovedDraws, moved_until_arrived

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N_CHAINS = 128
#: Standard errors that none of some fifty estimates exceeds.
MOST_ERRORS = 4.0


class Normals:
    """A mixture of normal densities of standard deviation 1."""

    def __init__(self, weights, centres):
        self.weights, self.centres = np.log(weights), np.asarray(centres, dtype=float)

    def logp_grad(self, x):
        apart = self.centres[:, None] - x
        logs = self.weights[:, None] - 0.5 * np.sum(apart**2, axis=2)
        logp = logsumexp(logs, axis=0)
        return logp, np.sum(np.exp(logs - logp)[..., None] * apart, axis=0)


def moved(target, *fits, seed=1, most=2_000_000):
    rng = np.random.default_rng(seed)
    return moved_until_arrived(target, fits, N_CHAINS, rng, may_go_on=lambda n: n <= most)


def standard(d, sd=1.0, at=0.0):
    return DiagonalState.from_scale(np.full(d, at), np.broadcast_to(sd, d).astype(float))


def apart_along_first(d, apart):
    centre = np.zeros(d)
    centre[0] = 0.5 * apart
    return np.array([centre, -centre])


def test_points_beyond_valleys_are_told_apart():
    target = Normals([0.7, 0.3], apart_along_first(3, 8.0))
    points = np.concatenate([target.centres + 0.3, target.centres, np.zeros((1, 3)), np.full((1, 3), np.nan)])

    def logp(x):
        return target.logp_grad(x)[0]

    heights = logp(points)
    assert tops(logp, points, heights, 8) == [2, 3]
    assert tops(logp, points, heights, 1) == [2]
    assert tops(logp, points, heights, 8, 1) == [1, 2]
    ends, heights = ascend(target, points[:2])
    assert_allclose(ends, target.centres, atol=0.1)
    assert tops(logp, ends, heights, 8) == [0, 1]
    assert tops(lambda x: logp(x) / 40.0, ends, heights / 40.0, 8) == [0]  # no valley of a nat


#: Dimensions and seeds: the second seed of many dimensions is slow.
SIZES = pytest.mark.parametrize(("d", "seed"), [(5, 1), (5, 2), (40, 1), pytest.param(40, 2, marks=pytest.mark.slow)])


def weighted(ended):
    """Return the draws, and the weight of each."""
    checks, (n, n_chains, d) = ended.checks, ended.draws.x.shape
    weights = np.repeat(checks.mode_weights or (1.0,), n_chains // checks.n_modes)
    return ended.draws.x.reshape(-1, d), np.tile(weights / weights.sum(), n) / n


def fit(model, **options):
    return fit_ngvi(model=model, random_seed=1, progressbar=False, **options)


# --- weights of modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["one wide fit", "both modes"])
@SIZES
def test_two_modes_that_no_chain_crosses(d, known, seed):
    centres = apart_along_first(d, 12.0)
    wide = standard(d, sd=[6.0] + [1.0] * (d - 1))
    fits = [wide] if known == "one wide fit" else [DiagonalState.from_scale(c, np.ones(d)) for c in centres]
    ended = moved(Normals([0.7, 0.3], centres), *fits, seed=seed)
    checks = ended.checks
    assert checks.is_exact
    assert checks.n_modes == 2
    first = int(ended.draws.x[0, 0, 0] < 0.0)
    assert checks.weight_errors[0] < 0.01
    assert_allclose(checks.mode_weights[first], 0.7, atol=MOST_ERRORS * checks.weight_errors[first])
    assert_allclose(ended.mass.value, 0.5 * d * np.log(2.0 * np.pi), atol=MOST_ERRORS * ended.mass.se)
    x, weights = weighted(ended)
    # sd of the first coordinate: that of the weights, 12 root(.21), and 1 within.
    assert_allclose(weights @ x[:, 0], 0.4 * 6.0, atol=MOST_ERRORS * (1.0 / checks.bulk**0.5 + 12.0 * 0.01))
    assert_allclose(weights @ x[:, 1:], 0.0, atol=(MOST_ERRORS + 0.5) / np.sqrt(checks.bulk))


@pytest.mark.parametrize("seed", [1, 2])
def test_three_modes(seed):
    centres = np.zeros((3, 5))
    centres[0, 0], centres[1, 1], centres[2, 0] = 8.0, 8.0, -8.0
    target = Normals([0.6, 0.3, 0.1], centres)
    ended = moved(target, standard(5, sd=[6.0, 6.0, 1.0, 1.0, 1.0]), seed=seed)
    checks = ended.checks
    assert checks.is_exact
    assert checks.n_modes == 3
    where = ended.draws.x[0, ::N_CHAINS]
    for centre, weight in zip(centres, [0.6, 0.3, 0.1], strict=True):
        i = int(np.argmin(np.sum((where - centre) ** 2, axis=1)))
        assert_allclose(checks.mode_weights[i], weight, atol=MOST_ERRORS * checks.weight_errors[i])


def test_a_mode_of_another_width_that_only_one_fit_is_at():
    """A tenth as wide, so that trajectories of the wide one can't stay in it."""

    class TwoWidths(Normals):
        def logp_grad(self, x):
            narrow, d = x - 20.0, x.shape[1]
            logs = np.array([np.log(0.4) - 0.5 * np.sum(x**2, axis=1),
                             np.log(0.6) + d * np.log(10.0) - 50.0 * np.sum(narrow**2, axis=1)])  # fmt: skip
            logp = logsumexp(logs, axis=0)
            p = np.exp(logs - logp)[..., None]
            return logp, -p[0] * x - 100.0 * p[1] * narrow

    ended = moved(TwoWidths([1.0], [[0.0]]), standard(4), standard(4, sd=0.1, at=20.0))
    checks = ended.checks
    assert checks.is_exact
    narrow = int(ended.draws.x[0, 0, 0] < 10.0)
    assert_allclose(checks.mode_weights[narrow], 0.6, atol=MOST_ERRORS * checks.weight_errors[narrow])
    one = moved(TwoWidths([1.0], [[0.0]]), standard(4))
    assert one.checks.n_modes == 1  # what nothing has hit is not known


def test_too_few_gradients_for_separate_modes_are_said(monkeypatch):
    """There are enough to find them, and for nothing else."""
    found = []
    monkeypatch.setattr(rounds, "basins_among", lambda *args: found.append(basins_among(*args)) or found[-1])
    target, fits = Normals([0.7, 0.3], apart_along_first(3, 12.0)), [standard(3, sd=[6.0, 1.0, 1.0])]
    ended = moved_until_arrived(target, fits, N_CHAINS, np.random.default_rng(1), may_go_on=lambda n: not found)
    assert not ended.checks.is_exact
    assert "chains stay in 2 modes, and the weights of the modes are unknown" in ended.checks.sentence


def test_chains_of_false_basins_go_on_together(monkeypatch):
    """A border runs through a mode of 1 % of the mass; chains beyond it have come to the other one, and differ."""
    target, about = Normals([0.01, 0.99], apart_along_first(3, 12.0)), [standard(3, at=[6.0, 0.0, 0.0])]
    wide = [ChainCoordinates.of(one) for one in (*about, standard(3, sd=6.0))]
    monkeypatch.setattr(rounds, "are_apart", lambda x: True)
    modes = np.array([[0.0, 0.3, 0.0], [0.0, -0.3, 0.0]])
    monkeypatch.setattr(rounds, "basins_among", lambda climbs, x: Basins(climbs, modes, wide))
    checks = moved(target, *about).checks
    assert not checks.is_exact
    assert "chains that began at different points differ" in checks.sentence


# --- models -----------------------------------------------------------------------------------------------------------


def two_answers():
    """A square is measured: which sign it has, only its prior tells."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.3, 1.0)
        z = pm.Normal("z")
        pm.Deterministic("square", x**2)
        pm.Normal("y", x**2 + 0.3 * z, 0.25, observed=np.array([1.9, 2.1, 2.0]))
    return model


def by_quadrature():
    """Return log p(y), and mean and standard deviation of x."""
    x, z = np.meshgrid(np.linspace(-3.0, 3.0, 1_201), np.linspace(-6.0, 6.0, 1_201), indexing="ij")
    log_p = -0.5 * ((x - 0.3) ** 2 + z**2) - np.log(2.0 * np.pi)
    for y in (1.9, 2.1, 2.0):
        log_p += -0.5 * ((y - x**2 - 0.3 * z) / 0.25) ** 2 - np.log(0.25 * np.sqrt(2.0 * np.pi))
    total = logsumexp(log_p)
    p = np.exp(log_p - total)
    mean = np.sum(p * x)
    return total + np.log(0.005 * 0.01), mean, np.sqrt(np.sum(p * (x - mean) ** 2))


def labels():
    y = np.concatenate([np.random.default_rng(i).normal(at, 0.5, 30) for i, at in enumerate((-3.0, 0.0, 3.0))])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0, shape=3)
        pm.NormalMixture("y", np.full(3, 1.0 / 3.0), mu, 0.5, observed=y)
    return model


@pytest.fixture(scope="module")
def both():
    return fit(two_answers(), posterior="moved")


def test_two_answers_are_those_of_quadrature(both):
    log_y, mean, sd = by_quadrature()
    checks = both.checks
    assert both.is_exact
    assert checks.n_modes == 2
    assert both.diagnose().reliable
    assert "2 modes found, with weights" in both.record.posterior
    error = 1.0 / np.sqrt(checks.effective_size)
    assert_allclose(both.mean_data["x"], mean, atol=MOST_ERRORS * sd * error)
    assert_allclose(both.std_data["x"], sd, rtol=MOST_ERRORS * error)
    found = both.log_marginal_likelihood
    assert_allclose(found.value, log_y, atol=MOST_ERRORS * found.se)
    draws = both.draw_flat(8_000, 1)
    assert_allclose(draws[:, 0].mean(), mean, atol=MOST_ERRORS * sd * error)
    assert_allclose(np.cov(draws.T, bias=True), both._state.cov(), atol=0.1)


def test_chains_have_their_weights(both, caplog):
    with caplog.at_level("INFO", logger="pymc.ngvi"):
        tree = both.chains()
    assert "weight of each" in caplog.text
    x, weight, mode = tree.posterior["x"].values, tree.sample_stats["weight"].values, tree.sample_stats["mode"].values
    assert_allclose(np.average(x, weights=weight), both.mean_data["x"])
    assert_allclose(weight.mean(), 1.0)
    assert len(np.unique(np.sign(x[mode == 0]))) == len(np.unique(np.sign(x[mode == 1]))) == 1
    assert len(np.unique(tree.sample_stats["superchain"].values)) == 2 * N_STARTS


def test_files_keep_modes(both, tmp_path):
    both.save(tmp_path / "moved.nc")
    again = pymc_ngvi.load(tmp_path / "moved.nc", two_answers())
    assert again.checks == both.checks
    assert_array_equal(again.draw_flat(100, 1), both.draw_flat(100, 1))
    assert_array_equal(again.mean_flat, both.mean_flat)
    assert again.log_marginal_likelihood == both.log_marginal_likelihood


@pytest.fixture(scope="module")
def of_labels():
    return fit(labels(), posterior="gaussian")


@pytest.mark.parametrize(("n_modes", "said"), [(6, "covers all equal modes"), (4, "covers some of")])
def test_labels_that_are_exchanged_are_named(of_labels, n_modes, said):
    """Draws of the fit, in four or all of the six orders of its labels; of all but two, most images are covered."""
    density, n, n_chains = of_labels.density, 40, 16
    x = of_labels.draw_flat(n * n_chains, 1).reshape(n, n_chains, 3)
    orders = list(itertools.permutations(range(3)))[:n_modes]
    x = np.concatenate([x[:, :, order] for order in orders], axis=1)
    checks = MovedChecks(1.0, 0.0, 3.0, 2e3, 2e3, 4, n, n_chains * n_modes, N_STARTS * n_modes, 1_000, 0.8,
                         n_modes=n_modes, mode_weights=(1.0 / n_modes,) * n_modes,
                         weight_errors=(0.001,) * n_modes)  # fmt: skip
    draws = MovedDraws(x, density.logp(x.reshape(-1, 3)).reshape(x.shape[:2]), checks, of_labels._state)
    approx = pymc_ngvi.NGVIApproximation(density, draws, random_seed=1)
    found = approx.diagnose(random_seed=1)
    assert said in " ".join(str(found).split())
    assert "the labels of `mu` are exchanged" in " ".join(str(found).split())
    assert any("labels" in reason for reason in found.reasons) == (n_modes == 4)
