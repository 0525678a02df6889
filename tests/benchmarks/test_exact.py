"""The benchmarks of exact posteriors: known answers, statistics of ranks, and pages with several tables."""

import calibration_exact as calibration
import exact_checks as checks
import exact_models as models
import numpy as np
import pages
import pytest

from scipy.signal import lfilter
from scipy.special import gammaln, logsumexp
from scipy.stats import gamma, norm


@pytest.fixture(scope="module")
def weighted():
    """Prior draws of mu, log tau and effects (in units of tau), with the likelihood as log weights: eight schools."""
    rng, n = np.random.default_rng(1), 200_000
    mu, tau, z = 5.0 * rng.normal(size=n), 5.0 * np.abs(rng.standard_cauchy(n)), rng.normal(size=(n, 8))
    theta = mu[:, None] + tau[:, None] * z
    log_lik = norm.logpdf(models.EFFECTS, theta, models.ERRORS)
    return np.column_stack([mu, np.log(tau)]), theta, z, log_lik


@pytest.mark.parametrize("centred", [True, False])
def test_the_answer_of_eight_schools_is_that_of_weighted_prior_draws(weighted, centred):
    globals_, theta, z, log_lik = weighted
    answer = models.schools_answer(centred)
    draws, log_w = np.hstack([globals_, theta if centred else z]), log_lik.sum(axis=1)
    w = np.exp(log_w - logsumexp(log_w))
    se = 1.0 / np.sqrt(1.0 / np.sum(w**2))  # of a mean, in standard deviations
    mean = w @ draws
    np.testing.assert_allclose((mean - answer.mean) / answer.sd, 0.0, atol=5 * se)
    np.testing.assert_allclose(np.sqrt(w @ (draws - mean) ** 2) / answer.sd, 1.0, atol=5 * se)
    log_evidence = logsumexp(log_w) - np.log(len(log_w))
    relative = np.std(np.exp(log_w - log_evidence)) / np.sqrt(len(log_w))
    assert answer.log_evidence == pytest.approx(log_evidence, abs=5 * relative)
    without = logsumexp(log_w[:, None] - log_lik, axis=0) - np.log(len(log_w))
    assert answer.elpd == pytest.approx((log_evidence - without).sum(), abs=5 * 8 * relative)


def test_bridge_sampling_of_chains_that_depend_on_themselves():
    """Twenty runs of logarithms of Gamma variables, whose normaliser is known: as far off as they say."""
    z = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        normal = lfilter([np.sqrt(1.0 - 0.9**2)], [1.0, -0.9], rng.normal(size=(4, 1_200, 2)), axis=1)[:, 200:]
        draws = np.log(gamma.ppf(norm.cdf(normal), 1.5))
        found = checks.bridge_sampled(lambda t: (1.5 * t - np.exp(t)).sum(axis=1), draws, rng)
        assert found.se < 0.02
        z.append((found.value - 2.0 * gammaln(1.5)) / found.se)
    assert abs(np.mean(z)) < 4.0 / np.sqrt(20)
    assert 0.5 < np.std(z) < 1.6


def test_ranks_of_draws_of_the_posterior_are_covered_at_the_nominal_level():
    every = np.arange(calibration.N_DRAWS + 1)
    assert [calibration.covered(every, level) for level in (0.5, 0.9)] == [0.5, 0.9]
    assert calibration.bars(every).tolist() == [50] * calibration.N_BINS
    assert calibration.covered(np.array([0, 49, 950, 999]), 0.9) == 0.0
    assert calibration.covered(np.array([50, 949]), 0.9) == 1.0


def test_functionals_are_ranked_where_rows_have_them(rng):
    x, group = calibration.design()
    intercept, slope, effect = rng.normal(size=(2, 1)), rng.normal(size=(2, 1)), rng.normal(size=(2, 30))
    found = calibration.functionals("poisson", intercept[:, 0], slope[:, 0], effect)
    np.testing.assert_allclose(found[:, 0], np.exp(intercept + slope * x + effect[:, group]).sum(axis=1))
    np.testing.assert_allclose(found[:, 1], effect[:, 1] - effect[:, 0])
    assert len(calibration.RANKED) == len(calibration.PARAMETERS) + found.shape[1]
    rows = [{"exact": "[1, 2, 3, 4, 5]"}, {"exact": "[6, 7, 8, 9, 10]"}]
    assert calibration.ranks_of(rows, "exact").shape == (2, 5)
    assert calibration.ranks_of([*rows, {"exact": "[11, 12, 13]"}], "exact").tolist()[1:] == [[6, 7, 8], [11, 12, 13]]


def test_tables_of_two_scripts_share_a_page(tmp_path):
    page = tmp_path / "page.md"
    marks = [f"<!-- tables: written by tests/benchmarks/{name}.py -->" for name in ("one", "two")]
    page.write_text("".join(f"{mark}\nold\n<!-- end of the tables -->\nbehind {i}\n" for i, mark in enumerate(marks)))
    pages.write_between_marks(page, "first\n", "one.py")
    pages.write_between_marks(page, "second\n", "two.py")
    text = page.read_text()
    parts = [marks[0], "first", "behind 0", marks[1], "second", "behind 1"]
    assert [text.count(part) for part in parts] == [1] * len(parts)
    assert sorted(map(text.index, parts)) == list(map(text.index, parts))
    assert "old" not in text
