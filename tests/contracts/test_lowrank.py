"""The low-rank-plus-diagonal Gaussian where it leaves something out: its algebra, where steps end, and fits."""

import numpy as np
import pymc as pm
import pytest

from matrix import fit, two_seeds, whitener
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal
from targets import LOGISTIC, Glm, logistic

from pymc_ngvi import Status, fit_ngvi, load
from pymc_ngvi.core.hessians import MatrixHessian
from pymc_ngvi.families.lowrank import LowRankFamily
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.registry import choose

N_DIM, RANK = 30, 3


def precision(rank, signs=(1.0, -1.0, 1.0), seed=1):
    """Return a matrix of this rank, narrow and wide directions, plus a diagonal one, on scales far apart."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((N_DIM, rank)))[0]
    size = np.resize(np.where(np.array(signs) > 0.0, 20.0, -0.9), rank)
    scale = np.geomspace(0.1, 10.0, N_DIM)
    return scale[:, None] * (np.diag(rng.uniform(0.8, 1.2, N_DIM)) + (axes * size) @ axes.T) * scale


def stepped(q, matrix, n):
    """Take steps with the exact moments of a Gaussian target of this precision, about 0."""
    for _ in range(n):
        curvature = q.curvature(MatrixHessian(-matrix))
        q = next(
            new[0]
            for rho in 0.5 ** np.arange(10)
            if (new := q.precision_scaled_by(q.add_to_diagonal(rho * curvature, 1.0 - rho), np.zeros(N_DIM)))
        )
    return q


def start(rank):
    return LowRankFamily(rank).from_scale(np.zeros(N_DIM), np.ones(N_DIM))


def kl(q, matrix):
    relative = q.cov() @ matrix
    return 0.5 * (np.trace(relative) - N_DIM - np.linalg.slogdet(relative)[1])


@pytest.fixture
def state():
    """A state that holds some of a precision, in an early stage of the steps."""
    return stepped(start(RANK), precision(RANK), 3)


def test_the_distribution_is_that_of_its_covariance(state):
    theta = np.random.default_rng(2).standard_normal((4, N_DIM))
    p, d = state.axes[:, :RANK], state.factor
    held = d[:, None] * (np.eye(N_DIM) + p @ state.core @ p.T) * d
    assert np.linalg.eigvalsh(state.core).min() < -0.1 < 0.1 < np.linalg.eigvalsh(state.core).max()
    known = multivariate_normal(state.mean(), np.linalg.inv(held))
    assert_allclose(state.cov(), known.cov, rtol=1e-9, atol=1e-10)
    assert_allclose(state.sd() ** 2, np.diag(known.cov), rtol=1e-9)
    assert_allclose(state.log_density(theta), known.logpdf(theta), rtol=1e-9)
    assert_allclose(state.entropy(), known.entropy(), rtol=1e-10)
    c = whitener(state)
    assert_allclose(state.whiten(theta), theta @ c, rtol=1e-8, atol=1e-10)
    assert_allclose(state.dewhiten(state.whiten(theta)), theta, rtol=1e-8, atol=1e-10)
    assert_allclose(state.precision_product(theta), theta @ held, rtol=1e-8, atol=1e-8)


def test_entries_of_the_covariance(state):
    rows, cols = np.array([0, 3, 3, 5]), np.array([0, 3, 1, 2])
    assert_allclose(state.covariances(rows, cols), state.cov()[rows, cols], rtol=1e-9, atol=1e-12)


def test_what_holds_for_diagonal_gaussians_alone_is_refused(state):
    for name in ("divergence", "whitened_precision", "outer_mean", "squared", "scaled_columns"):
        with pytest.raises(NotImplementedError, match="low-rank"):
            getattr(state, name)(state)


def test_a_curvature_is_known_on_the_axes_and_on_the_diagonal(state):
    matrix, c = precision(6, seed=2), whitener(state)
    whole = c.T @ matrix @ c
    curvature = state.curvature(MatrixHessian(-matrix))
    assert_allclose(state.curvature_diagonal(curvature), np.diag(whole), rtol=1e-8)
    assert_allclose(state.curvature_error(state.curvature(MatrixHessian(-np.linalg.inv(state.cov())))), 0.0, atol=1e-8)
    # Inner products: exact for what is in the span of P.
    p = state.axes[:, :RANK]
    error = whole - np.eye(N_DIM)
    across = error @ p - p @ (p.T @ error @ p)
    outside = np.eye(N_DIM) - p @ p.T
    rest = np.diag(outside @ error @ outside) ** 2 / np.diag(outside)
    flat = state.flat(state.curvature_error(curvature))
    expected = np.sum((p.T @ error @ p) ** 2) + 2.0 * np.sum(across**2) + np.sum(rest)
    assert_allclose(flat @ flat, expected, rtol=1e-8)
    # What a vector does not hold is left as it is: the search goes on after steps that secants correct.
    identity = curvature - state.curvature_error(curvature)
    assert_allclose(identity + state.unflat(flat), curvature, rtol=1e-8, atol=1e-10)


@two_seeds
@pytest.mark.parametrize("signs", [(1.0,), (-1.0,), (1.0, -1.0, 1.0)], ids=["narrow", "wide", "both"])
def test_steps_come_to_rest_at_the_target_where_the_rank_is_enough(seed, signs):
    matrix = precision(RANK, signs, seed)
    q = stepped(start(RANK), matrix, 20)
    assert kl(q, matrix) < 1e-4


def test_where_the_rank_is_too_small_the_elbo_has_no_slope():
    """By differences of the divergence along D and along the columns; both are twenty times as large at the start."""
    matrix = precision(6)
    q = stepped(start(RANK), matrix, 60)
    rng, values = np.random.default_rng(4), np.linalg.eigvalsh(q.core)

    def divergence(change_d, change_p):
        axes = np.column_stack([q.axes[:, :RANK] + change_p, q.axes[:, RANK:]])
        held = (q.factor + change_d)[:, None] * (np.eye(N_DIM) + axes[:, :RANK] @ q.core @ axes[:, :RANK].T)
        relative = np.linalg.solve(held * (q.factor + change_d), matrix)
        return 0.5 * (np.trace(relative) - N_DIM - np.linalg.slogdet(relative)[1])

    assert np.abs(values).min() > 0.5
    for _ in range(10):
        d, p = 1e-4 * q.factor * rng.standard_normal(N_DIM), 1e-4 * rng.standard_normal((N_DIM, RANK))
        assert abs(divergence(d, p) - divergence(-d, -p)) < 2e-6


def test_more_columns_leave_less():
    matrix = precision(12)
    left = [kl(stepped(start(rank), matrix, 40), matrix) for rank in (1, 3, 6, 12)]
    assert left[0] > left[1] > left[2] > left[3]
    assert left[3] < 1e-3


def test_a_column_that_is_spent_on_one_coordinate_is_freed():
    """D of the coordinate is all but 0 there: without care it would stay so, and the column with it."""
    matrix = precision(RANK, (1.0,))
    q = stepped(start(RANK), matrix, 2)
    axes = np.linalg.qr(np.column_stack([np.eye(N_DIM)[:, :RANK], q.axes[:, RANK:]]))[0]
    factor = np.where(np.arange(N_DIM) < RANK, 1e-3, 1.0) * np.sqrt(np.diag(matrix))
    trapped = type(q)(q.location, factor, axes, 1e6 * np.eye(RANK), q.beside)
    assert kl(stepped(trapped, matrix, 20), matrix) < 1e-4


def test_steps_of_the_mean_do_not_overshoot_along_narrow_directions_that_q_lacks():
    """However small the step: what other axes tell of the target is kept from one to the next."""
    matrix = precision(6, (1.0,))
    q = stepped(start(RANK), matrix, 40)
    answer = np.random.default_rng(1).standard_normal(N_DIM) * q.sd()
    curvature = q.curvature(MatrixHessian(-matrix))
    _, step = q.precision_scaled_by(q.add_to_diagonal(0.01 * curvature, 0.99), q.whiten(matrix @ answer))

    def missed(step):
        return (step - answer) @ matrix @ (step - answer) / (answer @ matrix @ answer)

    assert missed(step) < 0.2
    assert missed(q.cov() @ matrix @ answer) > 2.0


# --- fits -------------------------------------------------------------------------------------------------------------


@two_seeds
def test_the_elbo_is_between_those_of_independent_coordinates_and_of_all_gaussians(seed):
    """It grows with the rank. All are exact: of the Gaussians that were found, by quadrature."""
    target, elbos = logistic(n_dim=12), []
    for rank in (None, 1, 3, 12):
        options = {"family": "diagonal"} if rank is None else {"family": "lowrank", "rank": rank}
        approx = fit_ngvi(model=model_of(target), random_seed=seed, progressbar=False, **options)
        assert approx.status is Status.CONVERGED
        elbos.append(target.elbo(approx.mean_flat, approx.q.cov()))
    best = target.elbo(*target.optimum("full"))
    assert elbos[0] < elbos[1] < elbos[2] < elbos[3] < best + 1e-8
    assert best - elbos[3] < 0.05  # the tolerance


def model_of(target):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, target.prior_sd, shape=target.n_dim)
        pm.Bernoulli("y", logit_p=target.design @ beta, observed=target.y.astype(int))
    return model


@two_seeds
def test_a_regression_with_fewer_rows_than_columns_is_held(seed):
    rng = np.random.default_rng(3)
    design = rng.standard_normal((6, 60))
    target = Glm(design, (rng.random(6) < 0.5).astype(float), LOGISTIC, 0.3)
    _, state = fit(target, choose(family="lowrank"), seed=seed)
    mean, cov = target.optimum("full")
    assert state.status is Status.CONVERGED
    assert target.elbo(mean, cov) - target.elbo(state.rule.q.mean(), state.rule.q.cov()) < 0.05


@pytest.mark.parametrize("rank", [1, 4, 100])
def test_the_start_has_the_scales_that_were_asked_for(rank):
    scale = np.linspace(0.5, 2.0, N_DIM)
    q = LowRankFamily(rank).from_scale(np.ones(N_DIM), scale)
    assert_allclose(q.cov(), np.diag(scale**2), rtol=1e-12, atol=1e-14)
    assert q.core.shape == (min(rank, N_DIM),) * 2


def test_the_rank_is_an_option_of_this_family_alone(tmp_path):
    with pytest.raises(ValueError, match="rank is that of family='lowrank'; the family is 'full'"):
        FitOptions(family="full", rank=3)
    with pytest.raises(ValueError, match="rank should be a whole number of at least 1"):
        FitOptions(family="lowrank", rank=0)
    with pm.Model() as model:
        pm.Normal("x", shape=6)
    approx = fit_ngvi(model=model, family="lowrank", rank=2, random_seed=1, progressbar=False)
    approx.save(tmp_path / "fit.nc")
    again = load(tmp_path / "fit.nc", model=model)
    assert again.q.core.shape == (2, 2)
    assert_allclose(again.q.cov(), approx.q.cov(), rtol=0)
