"""Simulated mixed models: the data, and what is made of estimates and intervals."""

import numpy as np
import pytest
import simulated_glmms_models as models
import simulated_glmms_tables as tables

INTERCEPTS, SLOPES = models.Design(20_000, 3, "poisson", slopes=False), models.Design(20_000, 9, "poisson", slopes=True)


def row(estimates, low, high, **others):
    """Return a row of results, as it is read from a file."""
    joined = {n: ";".join(map(str, v)) for n, v in (("estimates", estimates), ("low", low), ("high", high))}
    return {"set": "0", "cpu": "1", "interval_cpu": "", "status": "exact", "method": "ours", **joined, **others}


@pytest.mark.parametrize("design", [INTERCEPTS, SLOPES], ids=["intercepts", "slopes"])
def test_data_have_the_moments_of_their_design(design):
    """E y = exp(x'beta + var / 2) at each time and in each group, within five standard errors."""
    data = models.simulate(design, 1)
    sizes = data.groupby("id").size()
    assert (sizes.min(), sizes.max()) == (1, design.most)
    assert sizes.mean() == pytest.approx((1 + design.most) / 2, abs=5 * design.most / np.sqrt(12 * design.n_subjects))
    assert not data.duplicated(["id", "time"]).any()
    assert data.groupby("id")["group"].nunique().max() == 1
    sds = models.TRUE_SD * [1.0, design.slopes]
    for (time, group), part in data.groupby(["time", "group"]):
        eta = models.TRUE_BETA @ [1.0, time, group, time * group]
        covariance = models.TRUE_CORRELATION * sds[0] * sds[1]
        expected = np.exp(eta + 0.5 * (sds[0] ** 2 + time**2 * sds[1] ** 2 + 2 * time * covariance))
        assert part["y"].mean() == pytest.approx(expected, abs=5 * part["y"].std() / np.sqrt(len(part)))


def test_data_sets_differ_and_are_the_same_each_time():
    design = models.DESIGNS["binary, 50 x 3, intercepts"]
    one, other = models.simulate(design, 1), models.simulate(design, 2)
    assert one.equals(models.simulate(design, 1))
    assert not one.equals(other)


def test_coverage_counts_missing_intervals_against_and_infinite_ones_for():
    design = models.DESIGNS["binary, 50 x 3, intercepts"]
    truth, nan, inf = design.truth, float("nan"), float("inf")
    low = [truth - 1, truth + 0.1, truth * nan, [nan, 0, -1, 0, 0]]
    high = [truth + 1, truth + 1, truth * nan, [nan, 1, 1, 1, inf]]
    found = tables.figures([row(truth + k, *of) for k, of in enumerate(zip(low, high, strict=True))], design)
    np.testing.assert_allclose(found["bias"], 1.5)
    np.testing.assert_allclose(found["rmse"], np.sqrt(14 / 4))
    np.testing.assert_allclose(found["coverage"], [0.25, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(found["missing"], [0.5, 0.25, 0.25, 0.25, 0.25])


def test_tables_have_every_method_that_gave_anything():
    name = "counts, 100 x 9, slopes"
    truth = models.DESIGNS[name].truth
    ours = row(truth, truth - 1, truth + 1, design=name, version="", date="2026-01-01", environment="a machine")
    failed = {**ours, "method": "glmmTMB", "status": "error", "estimates": "", "environment": ""}
    no_intervals = [*truth[:4] - 1, *[float("nan")] * 3]
    theirs = row(
        truth + 1, no_intervals, no_intervals, design=name, method="lme4", version="R", environment="", date=""
    )
    not_yet = {**ours, "set": "1"}  # the others have not had this data set
    text = tables.write([ours, failed, theirs, not_yet])
    assert "| counts, 100 x 9, slopes | ours | 1 | exact 1 |" in text
    assert "lme4, Laplace" in text
    assert "| counts, 100 x 9, slopes | glmmTMB" not in text
    [line] = [line for line in text.splitlines() if line.startswith("| correlation")]
    assert line == "| correlation | 0.2 | +0.000 | +1.000 | 0.000 | 1.000 | 100.0 | - | 2.00 | - |"
