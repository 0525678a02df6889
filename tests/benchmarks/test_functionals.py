"""The benchmark of functionals: its summaries, the exact local level, errors and outcomes."""

import functionals
import functionals_models as models
import functionals_references as references
import functionals_series as series
import functionals_tables as tables
import functionals_weights as weights
import numpy as np
import pymc as pm
import pytest

from functionals_integral import local_level
from functionals_parts import effects, walk
from functionals_references import Summary
from functionals_series import FIRST_SD
from scipy.special import logsumexp
from scipy.stats import kurtosis, norm

NAMES = ["total", "mu[0]", "constant", "x"]


def summary(mean, sd, size, names=NAMES):
    """Return what is known of normals with so many independent draws; all but the last are functionals."""
    mean, sd, sizes = np.array(mean, float), np.array(sd, float), np.full(len(mean), float(size))
    low, high = (mean + sd * norm.ppf(level) for level in references.LIMITS)
    is_functional = np.arange(len(mean)) < len(mean) - 1
    return Summary(list(names), is_functional, mean, sd, low, high, np.full(len(mean), 3.0), sizes, sizes)


@pytest.fixture(scope="module")
def reference():
    return summary([10.0, 1.0, 1.0, 0.0], [2.0, 0.5, 0.0, 1.0], 1e6)


def errors(ours, reference):
    """Return the errors of a summary with draws that have its limits."""
    levels = (np.arange(20_000) + 0.5) / 20_000
    return functionals.errors(ours, reference, ours.mean + ours.sd * norm.ppf(levels)[:, None])


def test_errors_are_in_standard_deviations_of_the_reference(reference):
    found = errors(summary([10.6, 1.0, 1.0, -0.2], [2.0, 0.4, 0.0, 1.1], 1e6), reference)
    assert (found["worst_mean_at"], found["worst_sd_at"], found["coordinate_mean_at"]) == ("total", "mu[0]", "x")
    assert found["worst_mean"] == pytest.approx(0.3)
    assert found["worst_sd"] == pytest.approx(-0.2)
    assert found["worst_limit"] == pytest.approx(max(0.3, 0.2 * norm.ppf(0.945)))
    assert found["coordinate_mean"] == pytest.approx(-0.2)
    assert found["beyond"] == pytest.approx(2.0)
    assert (found["beyond_at"], found["n_functionals"]) == ("total", 2)  # a constant is left out


def test_three_joint_errors_are_tolerated_where_they_are_more(reference):
    ours = summary([10.6, 1.0, 1.0, 0.0], [2.0, 0.5, 0.0, 1.0], 100.0)
    found = errors(ours, reference)
    assert found["joint"] == pytest.approx(0.1, rel=1e-3)
    assert found["beyond"] == pytest.approx(1.0, rel=1e-3)
    wide = errors(summary([10.0, 1.0, 1.0, 0.0], [2.0, 0.5 * 1.3, 0.0, 1.0], 100.0), reference)
    assert wide["beyond"] == pytest.approx(0.3 / (3.0 / np.sqrt(2.0 * 100.0)), rel=1e-3)


def test_heavy_tails_are_compared_by_the_shares_of_draws_beyond_limits(reference):
    """A standard deviation that is ten times too large says nothing there; limits that are moved do."""
    heavy = reference._replace(kurtosis=np.array([1e3, 3.0, 3.0, 3.0]))
    ours = summary([10.0, 1.0, 1.0, 0.0], [20.0, 0.501, 0.0, 1.0], 4_000.0)
    levels = norm.ppf((np.arange(20_000) + 0.5) / 20_000)[:, None]
    tail = np.where(np.abs(levels) > 3.0, 1e4 * levels, levels)  # far out, other draws, within limits the same
    found = functionals.errors(ours, heavy, reference.mean + reference.sd * tail)
    assert (found["n_heavy"], found["worst_sd_at"]) == (1, "mu[0]")
    assert found["beyond"] < 0.05
    found = functionals.errors(ours, heavy, reference.mean + reference.sd * (levels + 0.3))
    assert found["beyond"] == pytest.approx(2.0, rel=0.01)
    assert (found["beyond_at"], found["worst_limit"]) == ("total", pytest.approx(0.3, rel=0.01))


def test_draws_that_are_not_finite_are_the_worst(reference):
    ours = summary([np.nan, 1.0, 1.0, 0.0], [np.nan, 0.5, 0.0, 1.0], 4_000.0)
    assert errors(ours, reference)["beyond"] == np.inf


def test_a_reference_of_other_variables_is_refused(reference):
    with pytest.raises(ValueError, match="make it anew"):
        errors(summary([0.0] * 4, [1.0] * 4, 10.0, names=["a", "b", "c", "d"]), reference)


@pytest.mark.parametrize(
    ("reliable", "beyond", "expected"),
    [("1", "0.9", "right"), ("1", "1.1", "false assurance"), ("0", "1.1", "doubted"), ("0", "0.9", "false alarm"),
     ("", "", "failed")],
)  # fmt: skip
def test_outcomes(reliable, beyond, expected):
    assert tables.outcome({"reliable": reliable, "beyond": beyond}) == expected


def test_a_summary_of_draws_survives_its_file(tmp_path, rng):
    draws = rng.gamma(2.0, size=(8_000, 2))
    found = Summary.of_draws(draws, ["a", "b"], 1, n_chains=2)
    assert found.is_functional.tolist() == [True, False]
    np.testing.assert_allclose(found.size, 8_000, rtol=0.1)
    np.testing.assert_allclose(found.kurtosis, kurtosis(draws, fisher=False), rtol=1e-10)
    file = references.file_of("a, b (c)", tmp_path)
    assert file.name == "a_b_c.npz"
    found.write(file)
    again = Summary.read(file)
    assert again.names == found.names
    for one, other in zip(again[1:], found[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_exact_local_level_is_that_of_weighted_prior_draws(rng):
    """Draws of the scales, weighted by p(y given these), and what else there is by Matheron's rule."""
    y, n = np.array([0.3, 0.9, 0.4]), 100_000
    s, e = np.abs(rng.normal(size=(2, n)))
    x = rng.normal(size=(n, 4)) * [FIRST_SD, 1.0, 1.0, 1.0]
    design = np.concatenate([np.ones((n, 3, 1)), s[:, None, None] * np.tril(np.ones((3, 3)))], axis=2)
    cross = design * [FIRST_SD**2, 1.0, 1.0, 1.0]  # the covariance of y and x
    inverse = np.linalg.inv(cross @ design.transpose(0, 2, 1) + e[:, None, None] ** 2 * np.eye(3))
    simulated = (design @ x[:, :, None])[:, :, 0] + e[:, None] * rng.normal(size=(n, 3))
    x = x + np.einsum("nij,nik,nk->nj", cross, inverse, y - simulated)
    log_w = 0.5 * (np.linalg.slogdet(inverse)[1] - np.einsum("i,nij,j->n", y, inverse, y))
    w = np.exp(log_w - logsumexp(log_w))
    eta = (design @ x[:, :, None])[:, :, 0]
    draws = np.column_stack([eta, eta.mean(axis=1), np.diff(eta, axis=1), np.log(s), np.log(e), x])
    found = local_level(y)
    mean, se = w @ draws, 5.0 * np.sqrt(np.sum(w**2))
    sd = np.sqrt(w @ (draws - mean) ** 2)
    np.testing.assert_allclose((found.mean - mean) / sd, 0.0, atol=se)
    np.testing.assert_allclose(found.sd / sd, 1.0, atol=3.0 * se)
    np.testing.assert_allclose(
        [w[d < limit].sum() for d, limit in zip(draws.T, found.high, strict=True)], 0.945, atol=se
    )


def test_weighted_draws_of_a_local_level_are_as_near_as_they_say(monkeypatch):
    monkeypatch.setattr(weights, "_N_FIRST", 400)
    monkeypatch.setattr(weights, "_N", 1_000)
    y = series.level_data(0.5)[::2] - 20.0
    monkeypatch.setattr(series, "level_data", lambda noise: y)
    latent = weights.Latent(
        weights.Rows("normal", y),
        0.0,
        lambda h: np.column_stack([np.ones(len(y)), np.exp(h[0]) * np.tril(np.ones((len(y), len(y))))]),
        lambda h: float(np.sum(h - 0.5 * np.exp(2.0 * h))),
        np.array([-0.5, -0.5]),
        ("s_log__", "e_log__"),
        ("first", "z"),
        np.concatenate([[FIRST_SD], np.ones(len(y))]),
    )
    found, exact = weights.weighted(series.local_level(noise=0.5), latent), local_level(y)
    assert found.names == exact.names
    assert found.least_size() > 300
    z = (found.mean - exact.mean) / exact.sd * np.sqrt(found.size)
    assert np.abs(z).max() < 4.5
    is_scale = np.array([name.endswith("_log__") for name in found.names])  # the log of a noise has a long tail
    np.testing.assert_allclose((found.sd / exact.sd)[~is_scale], 1.0, atol=0.2)
    np.testing.assert_allclose((found.high - exact.high) / exact.sd, 0.0, atol=0.3)


@pytest.mark.parametrize("centred", [True, False])
def test_both_forms_have_the_same_variables(centred):
    names = []
    for swapped in (False, True):
        with pm.Model() as model:
            sd = pm.HalfNormal("sd")
            effects("u", sd, 3, centred=centred, swapped=swapped)
            walk("w", sd, 2.0, 4, swapped=swapped)
        names.append({variable.name for variable in (*model.free_RVs, *model.deterministics)})
    assert names[0] <= names[1]


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS")
def test_every_model_has_a_reference_of_its_own_variables():
    assert set(models.MAY_FAIL) < set(models.MODELS)
    for name in models.MODELS:
        known, model = Summary.read(references.file_of(name)), models.model_of(name)
        n = int(known.is_functional.sum())
        assert {one.split("[")[0] for one in known.names[:n]} == set(references.functionals(model)), name
        assert known.names[n:] == references.coordinate_names(model), name
        assert known.least_size() >= references.WANTED, name
