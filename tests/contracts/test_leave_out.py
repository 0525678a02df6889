"""Cross-validation by weights, by groups that are integrated again, and by fits: beside integrals over a grid."""

import logging
import re

import arviz_stats
import numpy as np
import pymc as pm
import pytest

from arviz_stats.utils import ELPDDataLFO, ELPDDataLOO, ELPDDataLOOKFold
from scipy.special import logsumexp
from scipy.stats import halfnorm, norm

import pymc_ngvi

from pymc_ngvi.core.parts import DataParts, passes

pytestmark = pytest.mark.usefixtures("_compiled_once")

N_GROUPS, N_OF_GROUP = 8, 3
SIGMA = 0.7
GROUP = np.repeat(np.arange(N_GROUPS), N_OF_GROUP)
_rng = np.random.default_rng(4)
Y = 0.5 + 0.8 * _rng.normal(size=N_GROUPS)[GROUP] + SIGMA * _rng.normal(size=len(GROUP))
FOLD = _rng.permutation(len(GROUP)) % 4


def hierarchy():
    with pm.Model(coords={"school": [f"s{i}" for i in range(N_GROUPS)]}) as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        a = pm.Normal("a", mu, tau, dims="school")
        pm.Normal("y", a[GROUP], SIGMA, observed=Y)
    return model


@pytest.fixture(scope="module")
def approx():
    found = pymc_ngvi.fit_ngvi(model=hierarchy(), random_seed=1, progressbar=False)
    assert found.is_exact
    return found


def by_a_grid(rows):
    """Return log p of some observations: given mu and tau, groups are independent and normal."""
    mu, log_tau = np.linspace(-6.0, 6.0, 161)[:, None], np.linspace(-8.0, 2.5, 301)
    tau2 = np.exp(2.0 * log_tau)
    joint = norm.logpdf(mu, 0.0, 2.0) + halfnorm.logpdf(np.exp(log_tau)) + log_tau
    for g in range(N_GROUPS):
        y = Y[[i for i in rows if GROUP[i] == g]]
        if len(y):
            apart, n = y - mu[..., None], len(y)
            shrunk = tau2 / (SIGMA**2 + n * tau2)
            squares = (apart**2).sum(-1) - shrunk * apart.sum(-1) ** 2
            log_det = 2 * n * np.log(SIGMA) + np.log1p(n * tau2 / SIGMA**2)
            joint = joint - 0.5 * (squares / SIGMA**2 + log_det + n * np.log(2 * np.pi))
    return logsumexp(joint)


def given(rows, others):
    return by_a_grid([*others, *rows]) - by_a_grid(list(others))


EVERY = range(len(GROUP))
#: Four errors of two thousand draws of mu and tau, by which densities of rows vary by a fifth, of groups by a half.
CLOSE, CLOSE_OF_GROUPS = ({"atol": 4 * spread / np.sqrt(2_000)} for spread in (0.2, 0.5))


# --- groups are integrated again ---


def test_rows(approx):
    found = approx.leave_out(random_seed=1)
    assert isinstance(found, ELPDDataLOO)
    expected = [given([i], [j for j in EVERY if j != i]) for i in EVERY]
    np.testing.assert_allclose(found.elpd_i, expected, **CLOSE)
    assert found.elpd == pytest.approx(found.elpd_i.values.sum())
    assert found.se == pytest.approx(np.sqrt(len(GROUP)) * found.elpd_i.values.std())
    assert float(found.pareto_k.max()) < 0.5
    assert not found.warning
    assert 2.0 < found.p < N_GROUPS + 2


@pytest.mark.parametrize("groups", ["school", GROUP])
def test_groups(approx, groups):
    found = approx.leave_out(groups=groups, random_seed=1)
    expected = [given(np.flatnonzero(g == GROUP), np.flatnonzero(g != GROUP)) for g in range(N_GROUPS)]
    np.testing.assert_allclose(found.elpd_i, expected, **CLOSE_OF_GROUPS)
    dim = "school" if isinstance(groups, str) else "group"
    assert found.elpd_i.dims == (dim,)
    assert found.elpd_i[dim].values.tolist() == (
        [f"s{i}" for i in range(N_GROUPS)] if isinstance(groups, str) else list(range(N_GROUPS))
    )


def test_folds(approx):
    """Rows are predicted one by one, with others of their group that are in no fold, or in another one."""
    found = approx.leave_out(folds=FOLD, random_seed=1)
    assert isinstance(found, ELPDDataLOOKFold)
    assert found.n_folds == 4
    expected = [given([i], np.flatnonzero(FOLD[i] != FOLD)) for i in EVERY]
    np.testing.assert_allclose(found.elpd_i, expected, **CLOSE_OF_GROUPS)


def test_the_future(approx):
    """The last rows are those of the last groups: two at a time, given all before."""
    found = approx.leave_out(future=19, horizon=2, random_seed=1)
    assert isinstance(found, ELPDDataLFO)
    expected = [given([t, t + 1], range(t)) for t in range(19, 23)]
    np.testing.assert_allclose(found.elpd_i, expected, **CLOSE_OF_GROUPS)
    assert (found.forecast_horizon, found.min_observations, found.n_refits) == (2, 19, 0)


def test_the_model_is_as_it_was(approx):
    names = set(approx.model.named_vars)
    approx.leave_out(groups="school", random_seed=1)
    assert set(approx.model.named_vars) == names
    assert [rv.name for rv in approx.model.observed_RVs] == ["y"]


def test_the_same_seed_gives_the_same_bits(approx):
    one, two = (approx.leave_out(folds=3, random_seed=5).elpd for _ in range(2))
    assert one == two


# --- by draws, and by fits ---


def line(y):
    x = np.linspace(-1.0, 1.0, len(y))
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, 2.0, shape=2)
        pm.Normal("y", b[0] + b[1] * x, 1.0, observed=y)
    return model, np.column_stack([np.ones(len(y)), x])


def left_out_of_line(y, x, i):
    """Return log p(y_i | all others), in closed form."""
    keep = np.arange(len(y)) != i
    precision = x[keep].T @ x[keep] + np.eye(2) / 4.0
    mean = np.linalg.solve(precision, x[keep].T @ y[keep])
    return norm.logpdf(y[i], x[i] @ mean, np.sqrt(1.0 + x[i] @ np.linalg.solve(precision, x[i])))


@pytest.mark.parametrize("seed", [1, 2])
def test_draws_of_a_gaussian(seed):
    y = np.random.default_rng(seed).normal(size=20)
    model, x = line(y)
    found = pymc_ngvi.fit_ngvi(model=model, random_seed=1, progressbar=False).leave_out(random_seed=seed)
    expected = [left_out_of_line(y, x, i) for i in range(20)]
    np.testing.assert_allclose(found.elpd_i, expected, atol=4 * 0.5 / np.sqrt(2_000))


def with_an_outlier():
    y = np.random.default_rng(3).normal(size=8)
    y[-1] = 3.0
    model, x = line(y)
    return pymc_ngvi.fit_ngvi(model=model, random_seed=1, progressbar=False), y, x


def test_a_row_of_much_influence_is_left_out_by_a_fit(caplog):
    approx, y, x = with_an_outlier()
    with caplog.at_level(logging.INFO, logger="pymc.ngvi"):
        found = approx.leave_out(random_seed=1)
    assert re.search("[1-4] of 8 parts are left out by fits, of about", caplog.text)
    assert float(found.pareto_k[-1]) < 0.7
    assert not found.warning
    error = float(found["mcse_i"][-1])
    assert 0.0 < error < 0.05
    assert float(found.elpd_i[-1]) == pytest.approx(left_out_of_line(y, x, 7), abs=4 * error)


def test_without_fits_there_is_a_warning(caplog):
    approx = with_an_outlier()[0]
    with caplog.at_level(logging.WARNING, logger="pymc.ngvi"):
        found = approx.leave_out(random_seed=1, refit=False)
    assert re.search("[1-4] of 8 parts have a k-hat above 0.70", caplog.text)
    assert "refit=True fits again" in caplog.text
    assert found.warning
    assert float(found.pareto_k[-1]) > 0.7
    assert np.isnan(found["mcse_i"][-1])


def test_a_fit_that_fails_leaves_the_rest(caplog, monkeypatch):
    approx = with_an_outlier()[0]

    class Broken:
        def __init__(self, model, **options):
            pass

        def begin_with(self, density):
            pass

        def _problem(self, *options):
            raise RuntimeError

    monkeypatch.setattr(pymc_ngvi.NGVIApproximation, "_inference", Broken)
    with caplog.at_level(logging.WARNING, logger="pymc.ngvi"):
        found = approx.leave_out(random_seed=1)
    assert re.search("([1-4]) of \\1 fits failed", caplog.text)
    assert np.isfinite(found.elpd_i).all()
    assert np.isnan(found["mcse_i"][found.pareto_k > 0.7]).all()


# --- for ArviZ ---


def test_models_are_compared(approx):
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 2.0)
        pm.Normal("y", mu, SIGMA, observed=Y)
    without = pymc_ngvi.fit_ngvi(model=model, random_seed=1, progressbar=False)
    table = arviz_stats.compare({"with": approx.leave_out(random_seed=1), "without": without.leave_out(random_seed=1)})
    assert list(table.index) == ["with", "without"]


# --- what is left out ---


def test_sets_that_share_no_block_go_in_one_pass():
    blocks = [np.array(b) for b in ([0], [0], [1, 2], [2], [3], [])]
    assert passes(blocks).tolist() == [0, 1, 0, 1, 0, 0]


def test_parts_of_the_future():
    parts = DataParts.of_future(np.array([0, 1, 2, 3]), 2, 1)
    assert parts.out.toarray().tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert parts.scored.toarray().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": "school", "folds": 3}, "groups or folds: one of them"),
        ({"groups": "schol"}, "'schol'.*school"),
        ({"groups": np.zeros(3)}, r"a label for each row, shape \(24,\); got \(3,\)"),
        ({"folds": 1}, "from 2 to 24"),
        ({"folds": np.zeros(24)}, "one fold only"),
        ({"folds": np.zeros(5)}, r"shape \(24,\); got \(5,\)"),
        ({"future": 24}, "from 1 to 23"),
        ({"var_name": "z"}, "'z'"),
    ],
)
def test_bad_input(approx, options, message):
    with pytest.raises(ValueError, match=message):
        approx.leave_out(**options)
