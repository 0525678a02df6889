"""Each stochastic step rule against its formula, in matrices written out here; and the stop rule that they share.

On a quadratic log p, antithetic draws give exact moments whatever the estimator, so that a rule's path is known.
"""

import functools

import numpy as np
import pytest

from matrix import OF_PRECISION, first_state, ignore, make_rule, path, random_state, state_of, whitener
from targets import (
    NumpyTarget,
    Quadratic,
    gaussian_entropy,
    logistic,
    random_covariance,
    restrict,
)

from pymc_ngvi import Status
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import SparseFamily
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.options import choose
from pymc_ngvi.methods import Decay
from pymc_ngvi.methods.cholesky import plus
from pymc_ngvi.methods.stochastic import Stochastic, Windows

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

FAMILIES = ("full", "diagonal", "block", "sparse")
each_family = pytest.mark.parametrize("family", FAMILIES)
#: A mean of two covariances has no sparse inverse.
each_averaged = pytest.mark.parametrize("family", [family for family in FAMILIES if family != "sparse"])
two_seeds = pytest.mark.parametrize("seed", [1, 2], ids=["seed1", "seed2"])


def quadratic(seed, n_dim=4):
    rng = np.random.default_rng(seed)
    return Quadratic(rng.standard_normal(n_dim), np.linalg.inv(random_covariance(rng, n_dim)))


def assert_moments(q, mean, cov, rtol=1e-9):
    np.testing.assert_allclose(q.mean(), mean, rtol=rtol, atol=1e-11)
    np.testing.assert_allclose(q.cov(), cov, rtol=rtol, atol=1e-11)


def thalf(matrix):
    """Return the lower triangle with a halved diagonal."""
    return np.tril(matrix, -1) + 0.5 * np.diag(np.diag(matrix))


# --- rules for natural parameters -------------------------------------------------------------------------------------


def natural_path(family, target, q, rhos):
    """Return mean and covariance after natural-gradient steps of these sizes."""
    mean, precision = q.mean(), np.linalg.inv(q.cov())
    for rho in rhos:
        precision = (1.0 - rho) * precision + rho * restrict(family, target.precision)
        mean = mean + rho * np.linalg.solve(precision, target.precision @ (target.mean - mean))
    return mean, np.linalg.inv(precision)


@each_family
@two_seeds
@pytest.mark.parametrize(("given", "rho"), [(None, 0.1), (0.35, 0.35)])
def test_constant(family, seed, given, rho):
    target = quadratic(seed)
    rule = make_rule(target, choose(family=family, step="constant"), seed=seed, step_size=given)
    start = random_state(family, 4, np.random.default_rng(seed))
    states = path(rule, start, 7)
    assert_moments(states[-1].q, *natural_path(family, target, start, [rho] * 7))
    assert {s.step_size for s in states} == {rho}
    assert all(s.q is s.iterate for s in states)


@each_family
@two_seeds
@pytest.mark.parametrize(("beta", "kappa"), [(None, None), (0.6, 0.0), (2.0, 0.7), (0.5, 1.0)])
def test_proximal(family, seed, beta, kappa):
    target = quadratic(seed)
    choice = choose(family=family, step="proximal")
    rule = make_rule(target, choice, seed=seed, step_size=beta, step_decay=kappa)
    start = random_state(family, 4, np.random.default_rng(seed))
    betas = (beta or 0.25) / (1.0 + np.arange(6)) ** (kappa or 0.0)
    rhos = betas / (1.0 + betas)
    states = path(rule, start, 6)
    assert_moments(states[-1].q, *natural_path(family, target, start, rhos))
    np.testing.assert_allclose([s.step_size for s in states[1:]], rhos, rtol=1e-14)


class InTurn(NumpyTarget):
    """Another quadratic in each iteration, as minibatches of a conjugate model are."""

    has_minibatch = True

    def __init__(self, targets):
        super().__init__(targets[0].n_dim)
        self._targets, self._next, self.now = targets, 0, targets[0]

    def next_batch(self, rng):
        self.now = self._targets[self._next]
        self._next += 1

    def _logp(self, theta):
        return self.now._logp(theta)

    def _grad(self, theta):
        return self.now._grad(theta)

    def _hessians(self, theta):
        return self.now._hessians(theta)


@two_seeds
def test_decay_weights_what_it_saw_by_its_place(seed):
    """Steps 2/(2 + t) make lam_{T+1} = 2/((T+1)(T+2)) sum (t+1) lam of the t-th target, in natural parameters."""
    targets = [quadratic(10 * seed + k) for k in range(8)]
    rule = make_rule(InTurn(targets), choose(family="full", step="decay"), seed=seed)
    state = rule.init(random_state("full", 4, np.random.default_rng(seed)))
    for t in range(8):
        state = rule.step(state)
        weights = 2.0 * (np.arange(t + 1) + 1.0) / ((t + 1) * (t + 2))
        precision = np.einsum("t,tij->ij", weights, [q.precision for q in targets[: t + 1]])
        first = np.einsum("t,ti->i", weights, [q.precision @ q.mean for q in targets[: t + 1]])
        assert_moments(state.iterate, np.linalg.solve(precision, first), np.linalg.inv(precision), rtol=1e-8)
        assert state.step_size == 2.0 / (2.0 + t)


@each_averaged
@two_seeds
@pytest.mark.parametrize("estimator", ["price", "stein"])
def test_decay_averages_expectation_parameters(family, seed, estimator, monkeypatch):
    """In the form that the family stores: a diagonal or block one keeps the variances of each block's own mixture."""
    monkeypatch.setattr(Decay, "_guarded", Stochastic._guarded)  # steps of families without correlations overshoot
    target = logistic(n_dim=5)
    rule = make_rule(target, choose(family=family, step="decay", estimator=estimator), seed=seed, n_draws=32)
    start = random_state(family, 5, np.random.default_rng(seed))
    states = path(rule, start, 25)
    firsts = np.array([s.iterate.mean() for s in states[1:]])
    seconds = np.array([s.iterate.cov() + np.outer(s.iterate.mean(), s.iterate.mean()) for s in states[1:]])
    for n in (1, 2, 3, 25):
        weights = 2.0 * (np.arange(n) + 1.0) / (n * (n + 1))
        mean = weights @ firsts[:n]
        second = np.einsum("t,tij->ij", weights, seconds[:n])
        assert_moments(states[n].q, mean, restrict(family, second - np.outer(mean, mean)))
    apart = np.abs(states[-1].q.mean() - states[-1].iterate.mean()) / states[-1].q.sd()
    assert apart.max() > 1e-3  # the iterates do move, so that there was something to average


# --- rules for the coordinates of mean and factor ---------------------------------------------------------------------

#: Update, family, and the name of the state in `matrix`.
COORDINATES = [
    ("cholesky", "full", "full"),
    ("cholesky", "diagonal", "diagonal"),
    ("cholesky", "block", "block"),
    ("cholesky_precision", "full", "full precision"),
    ("cholesky_precision", "sparse", "sparse"),
    ("euclidean", "full", "full precision"),
    ("euclidean", "sparse", "sparse"),
    ("euclidean", "full", "full"),
    ("euclidean", "diagonal", "diagonal"),
    ("euclidean", "block", "block"),
]
each_coordinates = pytest.mark.parametrize(
    ("update", "family", "name"), COORDINATES, ids=[f"{update}-{name}" for update, _, name in COORDINATES]
)
NATURAL = [row for row in COORDINATES if row[0] != "euclidean"]
EUCLIDEAN = [row[1:] for row in COORDINATES if row not in NATURAL]
each_natural = pytest.mark.parametrize(
    ("update", "family", "name"), NATURAL, ids=[f"{update}-{name}" for update, _, name in NATURAL]
)
each_euclidean = pytest.mark.parametrize(("family", "name"), EUCLIDEAN, ids=[name for _, name in EUCLIDEAN])


class Coordinates:
    """Mean and dense factor of a Gaussian, with the gradients of the ELBO on a quadratic written out in matrices."""

    def __init__(self, update, family, name, target, q):
        self.natural, self.family, self.target = update != "euclidean", family, target
        self.of_precision = name in OF_PRECISION
        self.mean = q.mean()
        self.factor = np.linalg.inv(whitener(q)).T if self.of_precision else whitener(q)

    def cov(self):
        product = self.factor @ self.factor.T
        return np.linalg.inv(product) if self.of_precision else product

    def whitened(self):
        c = np.linalg.inv(self.factor).T if self.of_precision else self.factor
        p = self.target.precision
        return c, c.T @ p @ (self.target.mean - self.mean), np.eye(len(c)) - restrict(self.family, c.T @ p @ c)

    def direction(self):
        c, grad, error = self.whitened()
        sign = -1.0 if self.of_precision else 1.0
        if self.natural:
            factor = sign * self.factor @ thalf(error)
            return c @ grad, restrict(self.family, factor)
        # The inverse transpose of the factor; its lower triangle, within what the family stores.
        factor = sign * np.tril(np.linalg.solve(self.factor.T, error))
        return np.linalg.solve(c.T, grad), restrict(self.family, factor)

    def move(self, location, factor):
        self.mean, self.factor = self.mean + location, self.factor + factor


def exact_rule(update, family, name, target, step, **options):
    factor = ("precision" if name in OF_PRECISION else "covariance") if update == "euclidean" else None
    choice = choose(family=family, update=update, estimator="price", step=step)
    return make_rule(target, choice, seed=3, n_draws=2, factor=factor, **options)


def some_start(name, seed):
    """Half to twice as wide as N(0, I), correlated where the family can be."""
    return random_state(name, 5, np.random.default_rng(seed))


def in_turn(seed, n):
    """Return quadratics, one for each iteration: directions that turn, as those of noisy gradients do."""
    return [quadratic(100 * seed + k, 5) for k in range(n)]


def follow(rule, coordinates, targets, q, advance):
    """Compare every state of a rule's path with that of ``advance(t, direction)``, t = 1, 2, ..., which moves."""
    states = path(rule, q, len(targets))
    for t, (target, state) in enumerate(zip(targets, states[1:], strict=True), 1):
        coordinates.target = target
        advance(t, coordinates.direction())
        assert_moments(state.q, coordinates.mean, coordinates.cov(), rtol=1e-8)
    return states


@each_natural
@two_seeds
@pytest.mark.parametrize("given", [None, 0.02])
def test_snngm(update, family, name, seed, given):
    """Table 4 of Tan: normalise, average, correct for the start at 0, walk."""
    targets, q = in_turn(seed, 12), some_start(name, seed)
    rule = exact_rule(update, family, name, InTurn(targets), "snngm", step_size=given)
    here = Coordinates(update, family, name, targets[0], q)
    n_params = 5 + {"full": 15, "sparse": 15, "diagonal": 5, "block": 7}[family]
    alpha = given or 0.001 * np.sqrt(n_params)
    momentum = [np.zeros(5), np.zeros((5, 5))]

    def advance(t, direction):
        _, grad, error = here.whitened()
        if here.of_precision:  # in the metric of Fisher
            norm = np.sqrt(grad @ grad + np.sum(np.tril(error, -1) ** 2) + 0.5 * np.sum(np.diag(error) ** 2))
        else:
            norm = np.sqrt(sum(np.sum(part**2) for part in direction))
        for i in range(2):
            momentum[i] = 0.9 * momentum[i] + 0.1 * direction[i] / norm
        here.move(*(alpha * m / (1.0 - 0.9**t) for m in momentum))

    states = follow(rule, here, targets, q, advance)
    np.testing.assert_allclose([s.step_size for s in states[1:]], alpha, rtol=1e-14)


class Recorded(NumpyTarget):
    """Another target, with the last draws and gradients."""

    def __init__(self, inside):
        super().__init__(inside.n_dim)
        self._inside = inside

    def logp_grad(self, theta):
        logp, grad = super().logp_grad(theta)
        self.last = theta, grad
        return logp, grad

    def _logp(self, theta):
        return self._inside._logp(theta)

    def _grad(self, theta):
        return self._inside._grad(theta)


@each_natural
@two_seeds
@pytest.mark.parametrize("stl", [True, False])
def test_snngm_on_one_draw(update, family, name, seed, stl):
    """Algorithms 1b, 1c and 2b of Tan: one draw z, w = C^T grad h; and their twin without the gradient of log q."""
    target = Recorded(logistic(n_dim=5))
    choice = choose(family=family, update=update, estimator="pathwise", step="snngm")
    rule = make_rule(target, choice, seed=seed, stl=stl, step_size=0.02)
    state = rule.init(some_start(name, seed))
    momentum = [np.zeros(5), np.zeros((5, 5))]
    for t in range(1, 9):
        c = whitener(state.q)
        mean, cov = state.q.mean(), state.q.cov()
        state = rule.step(state)
        theta, grad = (rows[0] for rows in target.last)
        z = np.linalg.solve(c, theta - mean)
        w = c.T @ grad + (z if stl else 0.0)
        extra = 0.0 if stl else np.eye(5)
        if update == "cholesky_precision":
            factor = np.linalg.inv(c).T
            error = np.outer(z, w) + extra
            direction = w, -factor @ thalf(error)
            norm = np.sqrt(w @ w + np.sum(np.tril(error, -1) ** 2) + 0.5 * np.sum(np.diag(error) ** 2))
        else:
            factor = c
            error = restrict(family, np.outer(w, z) + extra)
            direction = w, factor @ thalf(error)
            norm = np.sqrt(np.sum((c @ w) ** 2) + np.sum(direction[1] ** 2))
        for i, part in enumerate((c @ direction[0], direction[1])):
            momentum[i] = 0.9 * momentum[i] + 0.1 * part / norm
        mean = mean + 0.02 * momentum[0] / (1.0 - 0.9**t)
        factor = factor + 0.02 * momentum[1] / (1.0 - 0.9**t)
        cov = factor @ factor.T
        assert_moments(state.q, mean, np.linalg.inv(cov) if update == "cholesky_precision" else cov, rtol=1e-8)
    assert target.n_gradients == 8 + 8  # of the first look, and one in each iteration


def kl(one, other):
    """Return KL(one || other) of Gaussians, each a pair of mean and covariance."""
    (m, a), (n, b) = one, other
    solved = np.linalg.solve(b, a)
    return 0.5 * (np.trace(solved) - len(m) - np.linalg.slogdet(solved)[1] + (n - m) @ np.linalg.solve(b, n - m))


class Arrow(Quadratic):
    """A Gaussian whose precision has the entries of a structure."""

    def __init__(self, labels, seed):
        rng, labels = np.random.default_rng(seed), np.asarray(labels)
        kept = np.equal.outer(labels, labels) | (np.minimum.outer(labels, labels) < 0)
        super().__init__(rng.standard_normal(5), np.where(kept, np.linalg.inv(random_covariance(rng, 5, 3.0)), 0.0))
        self.pattern = Pattern.of(self.precision)


@two_seeds
@pytest.mark.parametrize("estimator", ["price", "pathwise"])
@pytest.mark.parametrize("labels", [None, [0, 0, 0, -1, -1], [1, -1, 0, -1, 1]], ids=["dense", "sparse", "two blocks"])
def test_a_first_step_in_the_fisher_metric_has_the_length_alpha(seed, estimator, labels):
    """Half of its square, alpha^2 / 2 nats: by the Fisher information that second differences of the KL show.

    What the family has no entries for does not count, whatever the order of the coordinates.
    """
    if labels is None:
        family, target, q = "full", quadratic(seed, 5), some_start("full precision", seed)
    else:
        family, target = "sparse", Arrow(labels, seed)
        start = SparseFamily(SparseStructure.of_blocks(Partition(labels))).from_scale(
            np.zeros(5), np.linspace(0.5, 1.5, 5)
        )
        other = Arrow(labels, seed + 10)
        q, _ = start.precision_scaled_by(
            start.curvature(other.mean_hessian(np.zeros((1, 5)))), np.zeros(5)
        )  # with its covariance
    choice = choose(family=family, update="cholesky_precision", estimator=estimator, step="snngm")
    rule = make_rule(target, choice, seed=3, n_draws=2 if estimator == "price" else 1, step_size=0.03)
    new = path(rule, q, 1)[-1].iterate
    by = new.location - q.location, new.factor - q.factor
    eps = 1e-2

    def apart(scale):
        moved = plus(q, scale * by[0], scale * by[1])
        return kl((q.mean(), q.cov()), (moved.mean(), moved.cov()))

    # The third-order terms cancel; the fourth are 1e-7 of the second, rounding is 1e-15 / 1e-7.
    assert 0.5 * (apart(eps) + apart(-eps)) / eps**2 == pytest.approx(0.5 * 0.03**2, rel=1e-5)


@each_coordinates
@two_seeds
@pytest.mark.parametrize(("given", "kappa"), [(None, None), (0.02, 0.6)])
def test_adam(update, family, name, seed, given, kappa):
    targets, q = in_turn(seed, 12), some_start(name, seed)
    rule = exact_rule(update, family, name, InTurn(targets), "adam", step_size=given, step_decay=kappa)
    here = Coordinates(update, family, name, targets[0], q)
    rate = given or (0.01 if here.of_precision else 0.001)
    first, second = ([np.zeros(5), np.zeros((5, 5))] for _ in range(2))

    def advance(t, direction):
        steps = []
        for i, part in enumerate(direction):
            first[i] = 0.9 * first[i] + 0.1 * part
            second[i] = 0.999 * second[i] + 0.001 * part**2
            steps.append(first[i] / (1 - 0.9**t) / (np.sqrt(second[i] / (1 - 0.999**t)) + 1e-8))
        here.move(*(rate / t ** (kappa or 0.0) * step for step in steps))

    states = follow(rule, here, targets, q, advance)
    np.testing.assert_allclose([s.step_size for s in states[1:]], rate / np.arange(1.0, 13.0) ** (kappa or 0.0))


@each_euclidean
@two_seeds
@pytest.mark.parametrize(("given", "kappa"), [(None, None), (None, 0.5), (2e-3, None), (2e-3, 1.0)])
def test_sgd(family, name, seed, given, kappa):
    targets, q = in_turn(seed, 8), some_start(name, seed)
    rule = exact_rule("euclidean", family, name, InTurn(targets), "sgd", step_size=given, step_decay=kappa)
    here = Coordinates("euclidean", family, name, targets[0], q)
    longest = max(np.sqrt(np.sum(part**2)) for part in here.direction())
    # A tenth of the smallest standard deviation.
    rate = given or 0.1 * np.sqrt(np.diag(q.cov()).min()) / longest

    def advance(t, direction):
        here.move(*(rate / t ** (kappa or 0.0) * part for part in direction))

    states = follow(rule, here, targets, q, advance)
    np.testing.assert_allclose([s.step_size for s in states[1:]], rate / np.arange(1.0, 9.0) ** (kappa or 0.0))


# --- steps that are too long ------------------------------------------------------------------------------------------


def wide(name, n_dim=3, scale=10.0):
    """Return a state that is far too wide for N(0, I), or far too narrow where the factor is of the precision."""
    return state_of(name, np.zeros(n_dim), (1.0 / scale if name in OF_PRECISION else scale) ** 2 * np.eye(n_dim))


#: Rules that go straight ahead, and where.
AHEAD = [("snngm" if natural else "sgd", *row) for row in COORDINATES for natural in [row[0] != "euclidean"]] + [
    ("adam", *row) for row in COORDINATES
]


each_ahead = pytest.mark.parametrize(
    ("step", "update", "family", "name"), AHEAD, ids=["-".join((row[0], row[1], row[3])) for row in AHEAD]
)


def first_step(step, coordinates):
    """Return the first step of a rule of step size 1, in the coordinates of the factor."""
    _, grad, error = coordinates.whitened()
    location, factor = coordinates.direction()
    if step == "adam":  # of the same length in every coordinate
        return np.sign(factor)
    if step == "sgd":
        return factor
    euclidean = np.sqrt(np.sum(location**2) + np.sum(factor**2))
    return factor / (np.sqrt(grad @ grad + 0.5 * np.sum(error**2)) if coordinates.of_precision else euclidean)


@each_ahead
def test_a_step_across_zero_changes_the_sign_of_the_factor_not_the_gaussian(step, update, family, name):
    """From far too wide, along the negative factor and twice as far: the result has a factor of positive diagonal."""
    target, q = Quadratic(np.zeros(3), np.eye(3)), wide(name)
    here = Coordinates(update, family, name, target, q)
    unit = first_step(step, here)
    assert (np.diag(unit) < 0.0).all()
    size = 2.0 * here.factor[0, 0] / -unit[0, 0]
    state = path(exact_rule(update, family, name, target, step, step_size=size), q, 1)[-1]
    here.factor = here.factor + size * unit
    assert (np.diag(here.factor) < 0.0).all()
    assert_moments(state.q, np.zeros(3), here.cov(), rtol=1e-6)  # Adam's epsilon
    assert (np.diag(whitener(state.q)) > 0.0).all()
    assert (np.diag(whitener(state.iterate)) < 0.0).all()
    assert state.n_failed == 0
    for of in (state.q, state.iterate):
        assert of.entropy() == pytest.approx(gaussian_entropy(here.cov()), rel=1e-6)


@pytest.mark.parametrize("name", ["full", "diagonal", "block", "full precision", "sparse"])
def test_an_update_without_a_valid_state_is_tried_with_half_the_step(name):
    """The diagonal is multiplied by 1 + rho (1 - A_ii)/2, A_ii = 100 where the state is ten times too wide."""
    update = "cholesky_precision" if name in OF_PRECISION else "cholesky"
    family = "full" if name == "full precision" else name
    target, q = Quadratic(np.zeros(3), np.eye(3)), wide(name)
    if name in OF_PRECISION:  # the factor shrinks where the state is too narrow, by no more than a half
        q = wide(name, scale=1.0)
        target = Quadratic(np.zeros(3), 0.01 * np.eye(3))
        rule = exact_rule(update, family, name, target, "constant", step_size=4.0)
        change = 0.5 * (0.01 - 1.0)
        rate = 2.0  # 1 - 4 .495 < 0 < 1 - 2 .495
    else:
        rule = exact_rule(update, family, name, target, "constant", step_size=0.5)
        change, rate = 0.5 * (1.0 - 100.0), 1.0 / 64.0  # 1 - 49.5/32 < 0 < 1 - 49.5/64
    state = path(rule, q, 1)[-1]
    assert state.step_size == rate
    factor = 1.0 + rate * change
    expected = q.sd() / factor if name in OF_PRECISION else q.sd() * factor
    np.testing.assert_allclose(state.q.sd(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("update", "estimator", "step"),
    [
        ("cholesky", "pathwise", "snngm"),
        ("cholesky_precision", "price", "snngm"),
        ("cholesky", "price", "adam"),
        ("euclidean", "pathwise", "sgd"),
        ("natural", "price", "decay"),
    ],
)
def test_at_the_exact_optimum_a_rule_stays_there(update, estimator, step):
    """Sticking the landing: the gradients are exactly 0, which is no failure to find a step."""
    target = Quadratic(np.zeros(3), np.eye(3))
    choice = choose(family="full", update=update, estimator=estimator, step=step)
    rule, state = make_rule(target, choice, seed=1), None
    state = loop.run(rule, first_state(rule, target, choice), 60, ignore)
    assert state.status is not Status.STALLED
    assert_moments(state.rule.q, np.zeros(3), np.eye(3))


@pytest.mark.parametrize("estimator", ["pathwise", "price"])
def test_the_default_step_of_sgd_is_bounded_where_the_first_gradient_is_all_but_nothing(estimator):
    """From the optimum, but for rounding: a step of a tenth of a standard deviation may be no measure of the rate."""
    mean = np.array([0.1, -0.2, 0.3])
    target = Quadratic(mean, np.eye(3))
    choice = choose(family="full", update="euclidean", estimator=estimator, step="sgd")
    rule = make_rule(target, choice, seed=1)
    state = loop.run(rule, first_state(rule, target, choice, mean), 60, ignore)
    assert state.status is not Status.STALLED
    assert target.elbo(mean, np.eye(3)) - target.elbo(state.rule.q.mean(), state.rule.q.cov()) < 0.01


# --- when to stop -----------------------------------------------------------------------------------------------------


def filled(size, values):
    return functools.reduce(lambda windows, value: windows.with_value(value), values, Windows(size))


def test_window_means_and_the_standard_error_of_the_last():
    values = np.random.default_rng(1).standard_normal(43) + 100.0
    windows = filled(10, values)
    np.testing.assert_allclose(windows.means, values[10:40].reshape(3, 10).mean(axis=1), rtol=1e-13)
    assert windows.se == pytest.approx(values[30:40].std(ddof=1) / np.sqrt(10), rel=1e-9)
    assert windows.n == 3
    assert windows.mean == pytest.approx(values[40:].mean())
    assert windows.slope == pytest.approx(0.5 * (values[30:40].mean() - values[10:20].mean()), rel=1e-9)


@pytest.mark.parametrize("window", [1, 7, 40])
def test_the_earliest_stop_is_after_three_windows(window):
    """Of the paper: from where nothing is to be gained. Gradients alone certify nothing, so that no gap ends it."""
    target = quadratic(1, 3)
    choice = choose(update="natural", estimator="stein", step="constant")
    rule = make_rule(target, choice, seed=1, window=window)
    best = state_of("full", target.mean, np.linalg.inv(target.precision))
    state = loop.run(rule, loop.start(rule, best), 500, ignore)
    assert state.status is Status.LEVELLED
    assert state.n_iterations == 3 * window


@two_seeds
def test_where_the_path_stops(seed):
    """The rule in one sentence, on the ELBOs that the history holds."""
    target = logistic(n_dim=4)
    choice = choose(update="cholesky", estimator="pathwise", step="constant")
    rule = make_rule(target, choice, seed=seed, window=20, step_size=0.02, n_draws=16)
    state = loop.run(rule, first_state(rule, target, choice), 5000, ignore)
    assert state.status is Status.LEVELLED
    means = -state.history.losses.reshape(-1, 20).mean(axis=1)
    slopes = 0.5 * (means[2:] - means[:-2])
    assert (slopes[:-1] >= 0.01).all()
    assert slopes[-1] < 0.01
    assert len(means) > 4  # it did rise
