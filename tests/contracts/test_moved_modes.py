"""Moved draws of posteriors with separate modes: which there are, how much each weighs, and the marginal likelihood."""

import itertools

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp

import pymc_ngvi

from pymc_ngvi import NotExactError, fit_ngvi
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.moves import rounds
from pymc_ngvi.moves.basins import Climbs, Counted, basins_among
from pymc_ngvi.moves.bridge import LogMass, ModeWeights, _bridge, log_mass
from pymc_ngvi.moves.coordinates import ChainCoordinates
from pymc_ngvi.moves.draws import MovedDraws
from pymc_ngvi.moves.rounds import N_STARTS, moved_until_arrived
from pymc_ngvi.moves.verdict import LEAST_SIZE, MovedChecks
from pymc_ngvi.posteriors.kinds import moved as kind

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


@SIZES
def test_two_modes_that_some_chains_cross(d, seed):
    """Six standard deviations: chains arrive by themselves in time, or are kept apart; both are right."""
    ended = moved(Normals([0.7, 0.3], apart_along_first(d, 6.0)), standard(d, sd=[3.0] + [1.0] * (d - 1)), seed=seed)
    x, weights = weighted(ended)
    assert ended.checks.is_exact
    part = weights @ (x[:, 0] > 0.0)
    assert_allclose(part, 0.7, atol=MOST_ERRORS * np.sqrt(0.21 / ended.checks.effective_size))


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


def test_frozen_chains_in_two_modes_have_not_arrived():
    """Superchains of each mode that stay where they began."""
    target = Normals([0.7, 0.3], apart_along_first(3, 12.0))

    class Stiff:
        """The right modes for climbs, but no trajectory gets anywhere: half of the steps lead outside."""

        def logp_grad(self, x):
            logp, grad = target.logp_grad(x)
            return np.where(np.round(1e6 * x).sum(axis=1) % 8 == 0, logp, logp - 1e4), grad

    ended = moved(Stiff(), standard(3, sd=[6.0, 1.0, 1.0]), most=200_000)
    assert not ended.checks.is_exact


# --- basins -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_basins(rng):
    centres = apart_along_first(3, 10.0)
    target = Counted(Normals([0.7, 0.3], centres))
    coordinates = ChainCoordinates.of(standard(3, sd=[5.0, 1.0, 1.0]))
    x = np.repeat(centres, 64, axis=0) + rng.standard_normal((20, 128, 3))
    return basins_among(Climbs(target, coordinates, 0.25), x), target


def test_points_are_in_the_basin_that_they_climb_to(two_basins):
    basins, target = two_basins
    assert len(basins) == 2
    x = np.array([[5.0, 0.0, 0.0], [-5.0, 0.0, 0.0], [0.3, 3.0, 0.0], [-0.3, 0.0, -3.0], [30.0, 0.0, 0.0]])
    before = target.n
    labels = basins.labels(x)
    assert_array_equal(labels == labels[0], [True, False, True, False, True])
    assert target.n > before  # those between
    before = target.n
    assert_array_equal(basins.inside(labels[0], x[:2]), [True, False])
    assert target.n == before  # there is no doubt


def test_chains_that_cross_are_in_no_separate_basins(rng):
    centres = apart_along_first(3, 10.0)
    climbs = Climbs(Normals([0.7, 0.3], centres), ChainCoordinates.of(standard(3, sd=[5.0, 1.0, 1.0])), 0.25)
    of_draws = rng.integers(2, size=(20, 128))
    assert basins_among(climbs, centres[of_draws] + rng.standard_normal((20, 128, 3))) is None
    alone = rng.standard_normal((20, 128, 3)) + centres[0]
    assert basins_among(climbs, alone) is None


# --- masses -----------------------------------------------------------------------------------------------------------


def of_gaussian(d, seed):
    """Return a Gaussian, and independent draws of it as chains, with log p that is 3 nats too high."""
    rng = np.random.default_rng(seed)
    factor = np.tril(rng.standard_normal((d, d))) / np.sqrt(d) + np.eye(d)
    q = FullState(np.arange(d, dtype=float), factor)
    x = q.draws(rng.standard_normal((20 * N_CHAINS, d))).reshape(20, N_CHAINS, d)
    logp = q.log_density(x.reshape(-1, d)).reshape(20, N_CHAINS) + 3.0
    return q, x, logp


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("d", [2, 30])
def test_the_mass_of_a_gaussian(d, seed):
    q, x, logp = of_gaussian(d, seed)
    rng = np.random.default_rng(seed)
    start = ChainCoordinates.of(standard(d))
    found = log_mass(lambda t: q.log_density(t) + 3.0, start, x, logp, N_STARTS, x.size / d, rng)
    assert found.se < 0.08
    assert_allclose(found.value, 3.0, atol=MOST_ERRORS * found.se)
    half = log_mass(
        lambda t: np.where(t[:, 0] > 0.0, q.log_density(t) + 3.0, -np.inf), start, x, logp, N_STARTS, x.size / d, rng
    )
    # A half of the proposed draws counts; all of the draws are of both halves, so that this mass is no mass of them.
    assert half.value < found.value - 0.1


@pytest.mark.parametrize("seed", [1, 2])
def test_the_mass_of_what_is_skewed(seed):
    """Logarithms of exponential variables: a Gaussian is far off in the tails."""
    rng = np.random.default_rng(seed)
    x = np.log(rng.exponential(size=(40, N_CHAINS, 6)))

    def log_p(theta):
        with np.errstate(over="ignore"):
            return np.sum(theta - np.exp(theta), axis=1)

    logp = log_p(x.reshape(-1, 6)).reshape(40, N_CHAINS)
    found = log_mass(log_p, ChainCoordinates.of(standard(6)), x, logp, N_STARTS, logp.size, rng)
    assert 0.0 < found.se < 0.03
    assert_allclose(found.value, 0.0, atol=MOST_ERRORS * found.se)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sd", [0.8, 1.3])
def test_a_gaussian_of_another_width_is_a_bridge_all_the_same(sd, seed):
    """In twenty coordinates, few draws of one are where those of the other are."""
    rng = np.random.default_rng(seed)
    x, p = rng.standard_normal((40, N_CHAINS, 20)), standard(20)
    logp = p.log_density(x.reshape(-1, 20)).reshape(40, N_CHAINS)
    found = _bridge(p.log_density, ChainCoordinates.of(standard(20, sd=sd)), x, logp, rng)
    assert 0.0 < found.se < 0.06
    assert_allclose(found.value, 0.0, atol=MOST_ERRORS * found.se)


def test_a_gaussian_that_is_elsewhere_tells_no_mass(rng):
    _, x, logp = of_gaussian(4, 1)
    found = log_mass(lambda t: np.full(len(t), -np.inf), ChainCoordinates.of(standard(4)), x, logp, N_STARTS, 2e3, rng)
    assert found.se == np.inf


def test_errors_of_weights():
    """Of two modes, a weight w has the error w (1 - w) times that of the difference."""
    found = ModeWeights.of([LogMass(np.log(0.7) + 5.0, 0.03), LogMass(np.log(0.3) + 5.0, 0.04)])
    assert_allclose(found.weights, [0.7, 0.3])
    assert_allclose(found.errors, 0.21 * 0.05)
    # As many independent draws have a part of .7 with the error root(.21 / n).
    assert_allclose(found.size, 0.21 / (0.21 * 0.05) ** 2)
    assert_allclose(found.total, [5.0, np.hypot(0.7 * 0.03, 0.3 * 0.04)])
    drawn = np.random.default_rng(1).normal([np.log(0.5), np.log(0.3), np.log(0.2)], [0.02, 0.03, 0.1], (100_000, 3))
    three = ModeWeights.of([LogMass(np.log(w), e) for w, e in ((0.5, 0.02), (0.3, 0.03), (0.2, 0.1))])
    simulated = np.exp(drawn) / np.exp(drawn).sum(axis=1, keepdims=True)
    assert_allclose(three.errors, simulated.std(axis=0), rtol=0.02)
    # Whatever it may be, a mass that is hardly met by its Gaussian is not known: neither is any weight.
    for unknown in (LogMass(-9.0, 0.5), LogMass(np.nan, np.inf)):
        assert ModeWeights.of([LogMass(0.0, 0.1), unknown]).size == 0.0


def test_weights_that_are_not_known_well_are_refused():
    checks = MovedChecks(1.0, 0.0, 3.0, 900.0, 900.0, 3, 50, 256, 16, 1_000, 0.8, n_modes=2, mode_weights=(0.7, 0.3),
                         weight_errors=(0.05, 0.05), weights_size=0.21 / 0.05**2)  # fmt: skip
    assert checks.weights_size < LEAST_SIZE
    assert not checks.is_reliable
    assert "the weights of the modes are unknown (0.700 +- 0.050, 0.300 +- 0.050)" in checks.sentence


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
    assert "in 2 modes, of weights" in both.record.posterior
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


def test_weights_that_can_not_be_had_are_named(monkeypatch):
    monkeypatch.setattr(kind, "_MOST", 10.0)
    monkeypatch.setattr(rounds, "_parted", lambda *args: None)
    with pytest.raises(NotExactError, match="the weights of the modes are unknown"):
        fit(two_answers(), posterior="moved")


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
    draws = MovedDraws(x, density.logp(x.reshape(-1, 3)).reshape(x.shape[:2]), checks)
    approx = pymc_ngvi.NGVIApproximation(density, draws.with_pool(of_labels._state), random_seed=1)
    found = approx.diagnose(random_seed=1)
    assert said in " ".join(str(found).split())
    assert "the labels of `mu` are exchanged" in " ".join(str(found).split())
    assert any("labels" in reason for reason in found.reasons) == (n_modes == 4)
