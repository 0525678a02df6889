"""Which posterior is taken, and what becomes of a fit where one of several fails by an exception."""

import logging

import numpy as np
import pymc as pm
import pytest

from gaussian import in_groups

from pymc_ngvi import NGVI, NotExactError, fit_ngvi
from pymc_ngvi.posteriors.kinds import TreeKind

QUIET = {"progressbar": False, "backend": "quick", "random_seed": 1}
KINDS = {"exact": "TreeKind", "nested": "LatentGaussianKind", "moved": "MovedKind"}


@pytest.fixture
def _of_users(monkeypatch):
    """As users have it: an exception in one posterior does not end the fit."""
    monkeypatch.delenv("PYMC_NGVI_RAISE")


of_users = pytest.mark.usefixtures("_of_users")


def fails(error):
    def failing(*args, **options):
        raise error

    return failing


def patch_kind(patch, name, method, value):
    patch.setattr(f"pymc_ngvi.posteriors.kinds.{KINDS[name]}.{method}", value)


def the_warning(caplog, n_traced=1):
    """Return the one warning; the traceback is at level DEBUG."""
    [warned] = [r for r in caplog.records if r.name == "pymc.ngvi" and r.levelno == logging.WARNING]
    traced = [r for r in caplog.records if r.name == "pymc.ngvi" and r.exc_info]
    assert traced
    assert n_traced is None or len(traced) == n_traced
    assert all(r.levelno == logging.DEBUG for r in traced)
    return warned.getMessage()


# --- an exception -----------------------------------------------------------------------------------------------------


@of_users
@pytest.mark.parametrize("method", ["run", "possible"])
def test_after_an_exception_the_next_posterior_is_tried(method, monkeypatch, caplog):
    patch_kind(monkeypatch, "exact", method, fails(ZeroDivisionError("a fault\nin two lines")))
    patch_kind(monkeypatch, "nested", "may_come_first", False)
    with caplog.at_level(logging.DEBUG, "pymc.ngvi"):
        approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.plan.taken.kind == "nested"
    failed = approx.plan.of("exact")
    assert (failed.outcome.value, failed.reason) == ("failed", "ZeroDivisionError: a fault")
    assert "the exact posterior failed (ZeroDivisionError: a fault)" in approx.record.posterior
    said = the_warning(caplog, 1 if method == "run" else None)
    assert "Exact posterior failed (ZeroDivisionError: a fault). The fit continues with the next" in said


@of_users
def test_where_all_others_fail_the_gaussian_is_left(monkeypatch, caplog):
    for name in KINDS:
        patch_kind(monkeypatch, name, "run", fails(ZeroDivisionError(f"in {name}")))
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.plan.taken.kind == "gaussian"
    assert approx.plan.of("exact").reason == "ZeroDivisionError: in exact"
    assert approx.plan.of("nested").reason == "ZeroDivisionError: in nested"
    assert "ZeroDivisionError" in approx.record.posterior
    np.testing.assert_array_equal(
        approx.mean_flat, fit_ngvi(model=in_groups(), posterior="gaussian", **QUIET).mean_flat
    )


@of_users
@pytest.mark.usefixtures("_nested_first")
def test_a_posterior_that_fails_before_any_gaussian_fit_is_not_tried_again(monkeypatch, caplog):
    patch_kind(monkeypatch, "nested", "run", fails(ZeroDivisionError("a fault")))
    with caplog.at_level(logging.DEBUG, "pymc.ngvi"):
        approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.plan.taken.kind == "exact"
    assert approx.plan.of("nested").reason == "ZeroDivisionError: a fault"
    assert the_warning(caplog).startswith("Nested posterior failed (ZeroDivisionError: a fault).")


@of_users
@pytest.mark.usefixtures("_nested_first")
def test_where_nothing_is_left_the_first_exception_is_raised(monkeypatch):
    patch_kind(monkeypatch, "nested", "run", fails(ZeroDivisionError("the first")))
    monkeypatch.setattr(NGVI, "_start", fails(FloatingPointError("the Gaussian")))
    with pytest.raises(ZeroDivisionError, match="the first") as caught:
        fit_ngvi(model=in_groups(), **QUIET)
    assert caught.value.__notes__ == ["Then FloatingPointError: the Gaussian"]


@of_users
@pytest.mark.parametrize("name", ["exact", "nested"])
def test_what_was_asked_for_by_name_is_not_replaced(name, monkeypatch):
    patch_kind(monkeypatch, name, "run", fails(ZeroDivisionError("a fault")))
    with pytest.raises(NotExactError, match=f"No {name} posterior: .*ZeroDivisionError: a fault") as caught:
        fit_ngvi(model=in_groups(), posterior=name, **QUIET)
    assert caught.value.approx.converged


@of_users
@pytest.mark.parametrize(
    ("place", "what"),
    [("methods.LineSearch.assess", "the assessment of the result"),
     ("fitting.modes.ModeSearch._found", "the search for other modes")],
)  # fmt: skip
def test_a_gaussian_fit_is_kept_without_what_fails_after_it(place, what, monkeypatch, caplog):
    monkeypatch.setattr(f"pymc_ngvi.{place}", fails(np.linalg.LinAlgError("no factor")))
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 5.0, shape=2)
        pm.Normal("y", x[0] ** 2 + x[1], 1.0, observed=np.full(20, 9.0))
    with caplog.at_level(logging.DEBUG, "pymc.ngvi"):
        approx = fit_ngvi(model=model, posterior="gaussian", **QUIET)
    assert approx.converged
    assert approx.record.undone == (f"{what} (LinAlgError: no factor)",)
    assert f"Not done: {what} (LinAlgError: no factor)." in str(approx.summary(100, khat_draws=None)).replace("\n", " ")
    assert the_warning(caplog).startswith(f"{what.capitalize()} failed (LinAlgError: no factor).")


@of_users
@pytest.mark.parametrize("place", ["is_even", "efficiency_of"])
def test_a_judgement_of_the_gaussian_may_fail(place, monkeypatch):
    monkeypatch.setattr(f"pymc_ngvi.results.choice.{place}", fails(np.linalg.LinAlgError("no factor")))
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_exact


@of_users
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.usefixtures("_nested_first")
def test_some_are_always_raised(error, monkeypatch):
    patch_kind(monkeypatch, "nested", "run", fails(error()))
    with pytest.raises(error):
        fit_ngvi(model=in_groups(), **QUIET)


# --- which is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_nested_first")
@pytest.mark.parametrize("limit", [{"HEAVIEST": -10.0}, {"N_PREDICTED": np.inf}], ids=["unreliable", "not exact"])
def test_after_a_posterior_that_is_not_exact_the_next_one_is_tried(limit, monkeypatch):
    """Before the last resort; the result is what it is when it is asked for."""
    for name, value in limit.items():
        monkeypatch.setattr(f"pymc_ngvi.nested.posterior.{name}", value)
    patch_kind(monkeypatch, "moved", "run", lambda *args, **options: pytest.fail("it is not needed"))
    approx, asked = fit_ngvi(model=in_groups(), **QUIET), fit_ngvi(model=in_groups(), posterior="exact", **QUIET)
    assert approx.is_exact
    assert approx.plan.taken.kind == "exact"
    assert approx.plan.of("nested").outcome.value == "came first"
    np.testing.assert_array_equal(approx.mean_flat, asked.mean_flat)


@pytest.mark.usefixtures("_nested_first")
def test_a_better_one_that_fails_or_takes_too_long_leaves_the_first(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.nested.posterior.N_PREDICTED", np.inf)
    with monkeypatch.context() as patch:
        patch.setattr("pymc_ngvi.marginal.trees.size_asked", lambda n_outside: 1e9)
        approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_nested
    assert approx.plan.of("exact").outcome.value == "failed"
    monkeypatch.setattr(TreeKind, "seconds", lambda *args, by_rows: 100.0)
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_nested
    assert approx.plan.of("exact").outcome.value == "too dear"


@of_users
@pytest.mark.usefixtures("_nested_first")
@pytest.mark.parametrize("place", ["inference.NGVI._start", "methods.LineSearch.step"])
def test_an_exception_on_the_way_to_a_better_one_leaves_the_first(place, monkeypatch, caplog):
    """The Gaussian fit that the next one would begin from."""
    monkeypatch.setattr("pymc_ngvi.nested.posterior.N_PREDICTED", np.inf)
    monkeypatch.setattr(f"pymc_ngvi.{place}", fails(ZeroDivisionError("a fault")))
    with caplog.at_level(logging.DEBUG, "pymc.ngvi"):
        approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_nested
    assert approx.record.undone == ("the exact posterior (ZeroDivisionError: a fault)",)
    assert "ZeroDivisionError: a fault" in the_warning(caplog)


@pytest.mark.usefixtures("_nested_first")
def test_a_gaussian_fit_that_nothing_can_follow_leaves_the_first(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.nested.posterior.N_PREDICTED", np.inf)
    monkeypatch.setattr("pymc_ngvi.core.status.Status.can_be_followed", False)
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_nested
    assert approx.plan.taken.kind == "nested"
    assert approx.plan.of("gaussian").outcome.value == "failed"
