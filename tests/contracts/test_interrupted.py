"""Ctrl-C at every stage of a fit: the call ends with what there is, and says what was not done."""

import os
import signal
import threading
import time

import numpy as np
import pymc as pm
import pytest

from gaussian import in_groups

import pymc_ngvi

from pymc_ngvi import NGVI, Status, fit_ngvi

QUIET = {"progressbar": False, "backend": "quick", "random_seed": 1}
KINDS = {"exact": "TreeKind", "nested": "LatentGaussianKind", "moved": "MovedKind"}


def skewed():
    with pm.Model() as model:
        pm.Normal("loc", pm.Gamma("rate", 2.0, 3.0), shape=2)
    return model


def two_modes():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 5.0, shape=2)
        pm.Normal("y", x[0] ** 2 + x[1], 1.0, observed=np.full(20, 9.0))
    return model


def interrupt(*args, **options):
    raise KeyboardInterrupt


def same_bits(a, b):
    return all(np.array_equal(a.q.params()[name], b.q.params()[name]) for name in a.q.params())


def patch_kind(patch, name, run):
    patch.setattr(f"pymc_ngvi.posteriors.kinds.{KINDS[name]}.run", run)


def assert_interrupted(approx, *undone):
    """It is told by the status, the record, the summary, and the log of the call."""
    assert approx.status is Status.INTERRUPTED
    assert approx.record.undone == undone
    assert all(part in str(approx.summary(100, khat_draws=None)).replace("\n", " ") for part in undone)
    assert "interrupted" in repr(approx).lower()
    assert approx.sample(5, random_seed=1).posterior.sizes["draw"] == 2


# --- before there is anything -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "inference.NGVI._problem",
        "inference.NGVI._start",
        "methods.LineSearch.step",
        "results.choice.Candidates.come_first",
    ],
)
def test_before_the_first_iteration_it_is_raised(place, monkeypatch):
    """No other error takes its place, and the next fit begins as if there had been none."""
    inference = NGVI(in_groups(), random_seed=1)
    options = {"progressbar": False, "backend": "quick"}
    with monkeypatch.context() as patch:
        patch.setattr(f"pymc_ngvi.{place}", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            inference.fit(**options)
    assert caught.value.__context__ is None
    again, whole = inference.fit(**options), fit_ngvi(model=in_groups(), **QUIET)
    np.testing.assert_array_equal(again.mean_flat, whole.mean_flat)
    assert same_bits(again.gaussian, whole.gaussian)


# --- the Gaussian fit -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize("iteration", [1, 3])
def test_in_an_iteration_the_last_one_is_kept(iteration, caplog):
    """A real SIGINT, as Ctrl-C sends it."""

    def callback(approx, losses, i):
        if i == iteration:
            signal.raise_signal(signal.SIGINT)

    options = {"model": skewed(), "posterior": "gaussian", **QUIET}
    approx = fit_ngvi(callbacks=[callback], **options)
    undone = ("iterations until convergence", "the assessment of the result", "the search for other modes")
    assert_interrupted(approx, *undone)
    assert approx.n_iterations == len(approx.hist) == iteration
    assert not approx.converged
    assert all(part in caplog.text for part in ("interrupted from the keyboard", "refine(n)", *undone))
    assert (approx.elbo.value, approx.elbo.se) == (-approx.hist[-1], np.inf)
    approx.refine(1000, progressbar=False)
    assert approx.status is Status.CONVERGED
    assert approx.record.undone == ()
    assert same_bits(approx, fit_ngvi(**options))


BY_DRAWS_OR_NOT = pytest.mark.parametrize(
    ("rule", "options"), [("Adaptive", {"estimator": "price"}), ("LineSearch", {})], ids=["draws", "quadrature"]
)


@BY_DRAWS_OR_NOT
def test_in_a_step_the_iteration_before_it_is_kept(rule, options, monkeypatch):
    options = {"model": skewed(), "posterior": "gaussian", **options, **QUIET}
    step, calls = getattr(pymc_ngvi.methods, rule).step, []

    def in_the_second(self, state):
        new = step(self, state)
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return new

    with monkeypatch.context() as patch:
        patch.setattr(f"pymc_ngvi.methods.{rule}.step", in_the_second)
        approx = fit_ngvi(**options)
    assert approx.status is Status.INTERRUPTED
    assert approx.n_iterations == 1
    approx.refine(1000, progressbar=False)
    whole = fit_ngvi(**options)
    if rule == "LineSearch":  # a step that is taken twice may choose finer rules of quadrature
        np.testing.assert_allclose(approx.elbo.value, whole.elbo.value, atol=1e-3)
    else:
        assert same_bits(approx, whole)


@BY_DRAWS_OR_NOT
def test_in_the_assessment_the_fit_is_kept_with_its_own_figures(rule, options, monkeypatch):
    options = {"model": skewed(), **options, **QUIET}
    with monkeypatch.context() as patch:
        patch.setattr(f"pymc_ngvi.methods.{rule}.assess", interrupt)
        approx = fit_ngvi(**options)
    others = () if "estimator" in options else ("other posteriors",)  # none where a method is named
    assert_interrupted(approx, "the assessment of the result", "the search for other modes", *others)
    assert approx.converged
    assert (approx.elbo.value, approx.elbo.se) == (-approx.hist[-1], np.inf)
    assert "error is not known" in str(approx.elbo)
    approx.refine(progressbar=False)
    whole = fit_ngvi(**(options | {"posterior": "gaussian"}))
    assert same_bits(approx, whole)
    assert (approx.status, approx.elbo) == (Status.CONVERGED, whole.elbo)


@pytest.mark.parametrize("place", ["ModeSearch._found", "_fitted", "_shared"])
def test_in_the_search_for_other_modes_the_first_fit_is_kept(place, monkeypatch):
    """With its assessment; nothing follows it, and refine looks for the modes."""
    with monkeypatch.context() as patch:
        patch.setattr(f"pymc_ngvi.fitting.modes.{place}", interrupt)
        for name in KINDS:
            patch_kind(patch, name, lambda *args, **options: pytest.fail("the call goes on"))
        approx = fit_ngvi(model=two_modes(), **QUIET)
    assert_interrupted(approx, "the search for other modes", "other posteriors")
    assert np.isfinite(approx.elbo.se)
    assert not approx.record.searched
    whole = fit_ngvi(model=two_modes(), posterior="gaussian", **QUIET)
    assert whole.record.modes
    approx.refine(progressbar=False)
    assert same_bits(approx, whole)
    assert len(approx.record.modes) == len(whole.record.modes)


# --- what follows it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["auto", "exact", "nested", "moved"])
def test_in_another_posterior_the_gaussian_fit_is_kept(wanted, monkeypatch):
    options = {"model": in_groups(), **QUIET}
    with monkeypatch.context() as patch:
        for name, kind in KINDS.items():
            patch_kind(patch, name, interrupt)
            patch.setattr(f"pymc_ngvi.posteriors.kinds.{kind}.may_come_first", False)
        approx = fit_ngvi(posterior=wanted, **options)
    kind = "exact" if wanted == "auto" else wanted
    assert f"the {kind} posterior" in approx.record.undone
    assert_interrupted(approx, *approx.record.undone)
    assert approx.converged
    assert np.isfinite(approx.elbo.se)
    assert str(approx.plan.of(kind).outcome.value) == "interrupted"
    assert approx.plan.taken.kind == "gaussian"
    assert same_bits(approx, fit_ngvi(posterior="gaussian", **options))


@pytest.mark.usefixtures("_nested_first")
def test_a_posterior_that_there_is_is_kept_while_the_next_one_is_made(monkeypatch):
    """Ctrl-C takes neither the nested one away, nor does anything follow it."""
    monkeypatch.setattr("pymc_ngvi.nested.posterior.N_PREDICTED", np.inf)
    patch_kind(monkeypatch, "exact", interrupt)
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert approx.is_nested
    assert_interrupted(approx, "the exact posterior")
    assert approx.plan.taken.kind == "nested"


# --- afterwards -------------------------------------------------------------------------------------------------------


def test_a_posterior_that_is_refined_stays_as_it_was(monkeypatch):
    approx = fit_ngvi(model=in_groups(), posterior="exact", **QUIET)
    before = approx.mean_flat
    with monkeypatch.context() as patch:
        patch_kind(patch, "exact", interrupt)
        assert approx.refine(100, progressbar=False, tol=1e-3) is approx
    assert approx.is_exact
    np.testing.assert_array_equal(approx.mean_flat, before)
    assert_interrupted(approx, "the posterior anew, after these iterations")
    assert "interrupted" not in approx.diagnose().verdict
    assert approx.refine(100, progressbar=False, tol=1e-4).status is Status.CONVERGED


def test_files_say_that_it_was_interrupted(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch_kind(patch, "exact", interrupt)
        approx = fit_ngvi(model=in_groups(), **QUIET)
    approx.save(tmp_path / "approx.nc")
    again = pymc_ngvi.load(tmp_path / "approx.nc", in_groups())
    assert again.converged
    assert_interrupted(again, *approx.record.undone)
    assert str(again.plan) == str(approx.plan)


@pytest.mark.parametrize("place", ["iteration", "exact"])
def test_many_fits_end_with_those_that_are_whole(place, monkeypatch):
    """A fit that was interrupted is no fit of its data."""
    fits, fit = [], NGVI.fit

    def third(self, *args, **options):
        fits.append(self)
        with monkeypatch.context() as patch:
            if len(fits) == 3 and place == "exact":
                patch_kind(patch, "exact", interrupt)
            elif len(fits) == 3:
                patch.setattr("pymc_ngvi.methods.LineSearch.step", after_one(pymc_ngvi.methods.LineSearch.step))
            return fit(self, *args, **options)

    monkeypatch.setattr(NGVI, "fit", third)
    with pytest.warns(UserWarning, match="Interrupted from the keyboard: 2 of 5 fits were done, which are kept"):
        many = pymc_ngvi.fit_many(
            in_groups(), [{"y": np.arange(20.0) * i} for i in range(5)], posterior="exact", progressbar=False
        )
    assert many.dataset.fit.values.tolist() == [0, 1]


def after_one(step):
    """Return a step that is interrupted at the second call."""
    calls = []

    def stepped(self, state):
        calls.append(state)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(self, state)

    return stepped


@pytest.mark.usefixtures("_sigint")
def test_a_signal_ends_the_call_at_once(monkeypatch):
    def endless(*args, **options):
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while time.monotonic() - began < 60.0:
            np.linalg.svd(np.ones((50, 50)))
        pytest.fail("no signal came")

    patch_kind(monkeypatch, "exact", endless)
    began = time.monotonic()
    approx = fit_ngvi(model=in_groups(), **QUIET)
    assert time.monotonic() - began < 30.0
    assert approx.record.undone == ("the exact posterior",)
