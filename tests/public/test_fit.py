"""The fit as users meet it: iterations, callbacks, seeds, refining, what it logs and warns of."""

import functools
import inspect
import logging
import re
import time
import warnings

import numpy as np
import pymc as pm
import pytest

from gaussian import stop_at
from pymc.variational import callbacks as pymc_callbacks
from scipy import stats

from pymc_ngvi import NGVI, ConvergenceWarning, NGVIApproximation, Status, fit_ngvi

pytestmark = pytest.mark.usefixtures("_compiled_once")

QUIET = {"progressbar": False, "backend": "quick"}
Y = np.array([0.3, 1.8, -0.4, 2.1])


@functools.cache
def conjugate_model():
    """Posterior N(4 mean(y) / 4.25, 1 / 4.25): a Gaussian q is exact, and the ELBO is the log evidence."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 2.0)
        pm.Normal("y", mu, 1.0, observed=Y)
    return model


LOG_EVIDENCE = stats.multivariate_normal(cov=np.eye(4) + 4.0).logpdf(Y)


@functools.cache
def skewed_model():
    """Not Gaussian: takes a handful of iterations, and the result depends on the draws."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 3.0)
        pm.Normal("loc", rate, 1.0, shape=2)
    return model


def same_bits(a, b):
    return all(np.array_equal(a.q.params()[name], b.q.params()[name]) for name in a.q.params())


def fit(n=10_000, model=None, **options):
    """Fit without a warning where it ends at the limit of iterations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fit_ngvi(
            n, model=model or skewed_model(), **{**QUIET, "random_seed": 1, "posterior": "gaussian", **options}
        )


# --- the model, and n -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda m: fit_ngvi(m, 2, **QUIET),
        lambda m: fit_ngvi(m, n=2, **QUIET),
        lambda m: fit_ngvi(2, model=m, **QUIET),
        lambda m: fit_ngvi(n=2, model=m, **QUIET),
        lambda m: fit_ngvi(None, 2, model=m, **QUIET),
    ],
    ids=["model-n", "model-n=", "n-model=", "names", "none"],
)
def test_the_model_or_n_may_come_first(call):
    model = skewed_model()
    with conjugate_model(), pytest.warns(ConvergenceWarning):
        approx = call(model)
    assert approx.model is model
    assert approx.n_iterations == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda m: fit_ngvi(2, m),
        lambda m: fit_ngvi(2, 3, model=m),
        lambda m: fit_ngvi(2, n=3),
        lambda m: fit_ngvi(m, 2, model=m),
        lambda m: fit_ngvi(m, model=skewed_model()),
    ],
    ids=["n-model", "n-n", "n-n=", "model-model=", "two-models"],
)
def test_two_models_or_two_n_are_refused(call):
    with pytest.raises(TypeError, match=r"fit_ngvi takes one model and one n: write fit_ngvi\(model, n=\.\.\.\)"):
        call(conjugate_model())


# --- n ----------------------------------------------------------------------------------------------------------------


def test_default_n_converges():
    assert inspect.signature(NGVI.fit).parameters["n"].default == 10_000
    assert inspect.signature(fit_ngvi).parameters["n"].default == 10_000
    with conjugate_model():
        approx = pm.fit(method="ngvi", random_seed=1, **QUIET)
    assert approx.converged
    assert approx.n_iterations == len(approx.hist) < 10
    np.testing.assert_allclose(approx.mean_flat, Y.sum() / 4.25, rtol=1e-10)
    np.testing.assert_allclose(approx.sd_flat, 4.25**-0.5, rtol=1e-10)
    np.testing.assert_allclose(approx.elbo.value, LOG_EVIDENCE, rtol=1e-10)
    # The loss is -ELBO on the draws of that iteration: its error is that of the mean of half a chi-square.
    n_draws = 32
    np.testing.assert_allclose(approx.hist[-1], -LOG_EVIDENCE, atol=5 * (0.5 / n_draws) ** 0.5)


def test_no_iterations_give_the_start(recwarn):
    start = {"rate": 2.0, "loc": [3.0, 4.0]}
    approx = fit_ngvi(0, model=skewed_model(), start=start, start_sigma=0.25, **QUIET)
    np.testing.assert_allclose(approx.mean_flat, [np.log(2.0), 3.0, 4.0], rtol=1e-12)
    np.testing.assert_array_equal(approx.sd_flat, 0.25)
    assert approx.status is Status.NOT_STARTED
    assert not approx.converged
    assert (approx.n_iterations, len(approx.hist), len(approx.gap_hist)) == (0, 0, 0)
    assert np.isfinite(approx.elbo.value)
    assert approx.sample(10).posterior["loc"].shape == (4, 3, 2)
    assert not recwarn.list


@pytest.mark.parametrize("n", [1, 2])
def test_n_is_the_most_iterations(n):
    with pytest.warns(ConvergenceWarning, match="iteration limit"):
        approx = fit_ngvi(n, model=skewed_model(), posterior="gaussian", random_seed=1, **QUIET)
    assert approx.status is Status.MAX_ITERATIONS
    assert approx.n_iterations == len(approx.hist) == len(approx.gap_hist) == n


@pytest.mark.parametrize("n", [-1, 1.5, True, "10"])
@pytest.mark.parametrize("method", ["pm.fit", "fit_ngvi", "NGVI.fit"])
def test_broken_n_is_refused(n, method):
    model = conjugate_model()
    calls = {
        "pm.fit": lambda: pm.fit(n, "ngvi", model, **QUIET),
        "fit_ngvi": lambda: fit_ngvi(n, model=model, **QUIET),
        "NGVI.fit": lambda: NGVI(model).fit(n, **QUIET),
    }
    with pytest.raises(ValueError, match="n is the maximum number of iterations, a whole number of at least 0; got"):
        calls[method]()


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_see_each_iteration():
    seen = []

    def watch(approx, losses, i):
        assert isinstance(approx, NGVIApproximation)
        seen.append((i, losses.copy(), approx.mean_flat.copy(), approx.cov_of("loc").values, approx.mean.eval()))

    approx = fit(callbacks=[watch])
    assert approx.n_iterations > 2, "too short a fit to tell anything"
    assert [i for i, *_ in seen] == list(range(1, approx.n_iterations + 1))
    for i, losses, mean, _, compiled_mean in seen:
        np.testing.assert_array_equal(losses, approx.hist[:i])
        np.testing.assert_array_equal(compiled_mean, mean)
    np.testing.assert_array_equal(seen[-1][2], approx.mean_flat)
    assert not np.array_equal(seen[0][2], seen[1][2]), "q moves while the fit is under way"
    # What a callback sees at iteration 2 is what a fit that ends there returns.
    short = fit(callbacks=[stop_at(2)])
    np.testing.assert_array_equal(seen[1][2], short.mean_flat)
    np.testing.assert_array_equal(seen[1][3], short.cov_of("loc"))
    np.testing.assert_array_equal(short.hist, approx.hist[:2])


@pytest.mark.parametrize("iteration", [1, 2])
def test_stop_iteration_stops_and_keeps(iteration, caplog, recwarn):
    later = []
    approx = fit_ngvi(
        model=skewed_model(), random_seed=1, callbacks=[stop_at(iteration), lambda *a: later.append(a)], **QUIET
    )
    assert approx.status is Status.STOPPED
    assert approx.n_iterations == iteration
    assert len(later) == iteration - 1, "callbacks run in order, none after the one that stops"
    assert same_bits(approx, fit(iteration))
    assert "refine(n)" in caplog.text
    assert not recwarn.list, "the user asked for it: no warning"


def test_stopping_a_fit_that_has_converged_leaves_it_converged():
    n = fit(model=conjugate_model()).n_iterations
    approx = fit(model=conjugate_model(), callbacks=[stop_at(n)])
    assert approx.status is Status.CONVERGED


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (stop_at(1), r"callbacks should be a list of functions; got one function: write \[stop\]"),
        ([3], r"callbacks should be functions of \(approx, losses, i\); got 3"),
    ],
    ids=["bare", "number"],
)
def test_callbacks_are_checked_before_the_fit(callbacks, message):
    with pytest.raises(TypeError, match=message):
        fit(callbacks=callbacks)


def test_other_errors_of_a_callback_are_the_users():
    def broken(approx, losses, i):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(callbacks=[broken])


def test_tracker_as_the_documentation_of_pymc_has_it():
    """Nodes of the approximation are taken before the fit, as from any other inference object of PyMC."""
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    tracker = pymc_callbacks.Tracker(mean=inference.approx.mean.eval, std=inference.approx.std.eval)
    approx = inference.fit(callbacks=[tracker], **QUIET)
    np.testing.assert_array_equal(tracker["mean"][-1], approx.mean_flat)
    np.testing.assert_allclose(tracker["std"][-1], approx.sd_flat)
    assert len(tracker["mean"]) == approx.n_iterations


def test_parameters_convergence():
    """PyMC's check compares the shared parameters between iterations: all of them, by value."""
    check = pymc_callbacks.CheckParametersConvergence(every=1, tolerance=1e9, diff="absolute")
    assert fit(callbacks=[check]).n_iterations == 2, "any change is small enough: the first comparison stops"
    check = pymc_callbacks.CheckParametersConvergence(every=1, tolerance=1e-12, diff="absolute")
    approx = fit(callbacks=[check])
    assert approx.converged, "no change is small enough: the fit goes on to its own end"
    assert len(check.prev) == approx.density.n_dim * (approx.density.n_dim + 1), "mean and factor"


def test_no_score():
    seen = []
    approx = fit(score=False, callbacks=[lambda approx, losses, i: seen.append(losses)])
    assert set(map(type, seen)) == {type(None)}
    assert len(seen) == approx.n_iterations
    assert len(approx.hist) == 0
    assert same_bits(approx, fit())


@pytest.mark.parametrize("score", [None, True])
def test_score(score):
    approx = fit(score=score)
    assert len(approx.hist) == approx.n_iterations
    assert len(approx.hist) == len(approx.gap_hist)
    assert np.isfinite(approx.hist).all()


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_generator_goes_on():
    rng = np.random.default_rng(7)
    assert not same_bits(fit(random_seed=rng, estimator="price"), fit(random_seed=rng, estimator="price"))


def test_global_generator_is_left_alone():
    np.random.seed(3)  # noqa: NPY002  (the global state is what is tested)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    fit(random_seed=1).sample(5)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 3), (2, 10_000), (0, 3)])
def test_refining_is_one_long_fit(first, then, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        approx = fit(first, random_seed=seed)
        assert approx.refine(then, progressbar=False) is approx
    whole = fit(first + then, random_seed=seed)
    assert same_bits(approx, whole)
    for name in ("hist", "gap_hist"):
        np.testing.assert_array_equal(getattr(approx, name), getattr(whole, name))
    assert (approx.status, approx.elbo, approx.gap) == (whole.status, whole.elbo, whole.gap)
    assert approx.n_iterations == whole.n_iterations


def test_refining_after_convergence_needs_a_smaller_tolerance():
    approx = fit()
    assert approx.converged
    before, n = approx.mean_flat.copy(), approx.n_iterations
    approx.refine(100, progressbar=False)
    assert approx.n_iterations == n
    np.testing.assert_array_equal(approx.mean_flat, before)
    first_hist, first_draws = approx.hist.copy(), approx.n_gradients
    # In three dimensions the tolerance is a tenth of tol; the last step of an exact fit undercuts it by much.
    approx.refine(100, progressbar=False, tol=1e-8)
    assert approx.converged
    assert approx.n_iterations > n
    assert approx.n_gradients > first_draws
    np.testing.assert_array_equal(approx.hist[:n], first_hist)
    assert not np.array_equal(approx.mean_flat, before)


def test_refining_a_converged_fit_says_why_nothing_happens(caplog):
    approx = fit(model=conjugate_model())
    caplog.clear()
    approx.refine(100, progressbar=False)
    assert "converged already: pass a smaller tol" in caplog.text
    assert approx.converged


def test_refining_the_first_of_two_fits_of_one_object():
    """Each result goes on from where it ended itself, whatever else was fitted since."""
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    first = inference.fit(callbacks=[stop_at(2)], **QUIET)
    inference.configure(random_seed=2, family="diagonal")
    second = inference.fit(callbacks=[stop_at(1)], **QUIET)
    mean = second.mean_flat.copy()
    first.refine(10_000, progressbar=False)
    assert same_bits(first, fit())
    np.testing.assert_array_equal(second.mean_flat, mean)
    assert second.n_iterations == 1


def test_refining_after_the_data_changed_is_refused():
    with pm.Model() as model:
        y = pm.Data("y", Y)
        pm.Normal("obs", pm.Normal("mu", 0.0, 2.0), 1.0, observed=y)
    approx = fit(0, model=model)
    with model:
        pm.set_data({"y": Y + 1.0})
    with pytest.raises(ValueError, match=r"The data 'y' were changed after the fit.*fit again"):
        approx.refine(5, progressbar=False)
    with model:
        pm.set_data({"y": Y})
    np.testing.assert_allclose(approx.refine(100, progressbar=False).mean_flat, Y.sum() / 4.25, rtol=1e-8)


@pytest.mark.parametrize("options", [{"n": 2}, {"n": 10_000, "max_draws": 8}, {}], ids=["limit", "noise", "converged"])
def test_refining_by_nothing_changes_nothing(options):
    approx = fit(**options)
    status, mean = approx.status, approx.mean_flat.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        approx.refine(0, progressbar=False)
    assert approx.status is status
    np.testing.assert_array_equal(approx.mean_flat, mean)


def test_refining_with_more_draws_cures_noise():
    with pytest.warns(ConvergenceWarning, match=r"noise-limited.*Raise max_draws"):
        approx = fit_ngvi(model=skewed_model(), posterior="gaussian", random_seed=1, max_draws=8, **QUIET)
    assert approx.status is Status.NOISE_LIMITED
    approx.refine(10_000, progressbar=False, max_draws=1024)
    assert approx.converged
    reference = fit(random_seed=3, tol=0.01)
    # Whitened errors of .063 and .028: see above.
    assert np.max(np.abs(approx.mean_flat - reference.mean_flat) / reference.sd_flat) < 3 * 0.07


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": -1.0}, "tol is in nats"),
        ({"max_draws": 7}, "max_draws should be a power of 2"),
        ({"n": -1}, "n is the"),
    ],
    ids=["tol", "max_draws", "n"],
)
def test_refining_with_broken_options_changes_nothing(options, message):
    approx = fit(2, estimator="price")
    before, record = approx.mean_flat.copy(), approx.record
    with pytest.raises(ValueError, match=message):
        approx.refine(**{"n": 5, "progressbar": False, **options})
    np.testing.assert_array_equal(approx.mean_flat, before)
    assert approx.record is record


# --- the inference object ---------------------------------------------------------------------------------------------


def test_approximation_before_the_first_fit():
    """It shows where the fit will start, and taking it changes nothing about the fit."""
    seed = np.random.default_rng(7)
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=seed, start={"rate": 2.0}, start_sigma=0.5)
    prepared = inference.approx
    assert inference.approx is prepared
    np.testing.assert_allclose(prepared.mean_flat[0], np.log(2.0), rtol=1e-12)
    np.testing.assert_array_equal(prepared.sd_flat, 0.5)
    assert prepared.sample(3).posterior["loc"].shape == (4, 1, 2)
    assert prepared.record is None
    assert inference.fit(include_transformed=True, **QUIET) is prepared
    assert prepared.converged
    assert prepared.include_transformed
    assert same_bits(prepared, fit(random_seed=np.random.default_rng(7), start={"rate": 2.0}, start_sigma=0.5))
    assert inference.fit(**QUIET) is not prepared, "a second fit leaves the first result alone"


def test_approximation_is_kept_when_the_seed_and_the_start_come_later():
    """The tracker of PyMC's documentation, beside ``pm.fit(method=inference, random_seed=...)``."""
    inference = NGVI(skewed_model(), posterior="gaussian")
    tracker = pymc_callbacks.Tracker(mean=inference.approx.mean.eval)
    options = {"random_seed": 1, "start": {"rate": 2.0}, "start_sigma": 0.5}
    approx = pm.fit(method=inference, callbacks=[tracker], model=inference.approx.model, **options, **QUIET)
    np.testing.assert_array_equal(tracker["mean"][-1], approx.mean_flat)
    assert same_bits(approx, fit(**options))


@pytest.mark.parametrize("change", [{"family": "diagonal"}, {"model": conjugate_model()}], ids=["family", "model"])
def test_approximation_of_other_options_is_not_kept(change):
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    before = inference.approx
    inference.configure(**change)
    approx = inference.fit(**QUIET)
    assert approx is not before
    assert approx is inference.approx
    assert approx.converged


def test_model_that_grew_after_the_approximation_was_taken():
    model = skewed_model.__wrapped__()  # one of its own
    inference = NGVI(model)
    _ = inference.approx
    with model:
        pm.Normal("late")
    with pytest.raises(ValueError, match="changed after the approximation was made"):
        inference.fit(**QUIET)


@pytest.mark.parametrize("option", [{"random_seed": 1}, {"family": "diagonal"}], ids=["seed", "family"])
def test_options_of_the_constructor_are_not_taken_by_fit(option):
    """They would be dropped without a word."""
    with pytest.raises(TypeError, match=rf"^{next(iter(option))} is an option of NGVI\(\.\.\.\)"):
        NGVI(skewed_model(), posterior="gaussian").fit(**option, **QUIET)


def test_failed_fit_leaves_the_last_result():
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    approx = inference.fit(2, callbacks=[stop_at(1)], **QUIET)
    with pytest.raises(ValueError, match="backend should be one of"):
        inference.fit(progressbar=False, backend="fortran")
    assert inference.approx is approx
    assert inference.refine(progressbar=False) is approx
    assert same_bits(approx, fit())


def test_before_the_first_fit():
    inference = NGVI(conjugate_model())
    with pytest.raises(TypeError, match="nothing to refine: call fit first"):
        inference.refine(3)
    assert len(inference.hist) == 0


def test_fitting_again_starts_anew():
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    a = inference.fit(callbacks=[stop_at(3)], **QUIET)
    b = inference.fit(callbacks=[stop_at(3)], **QUIET)
    assert same_bits(a, b)
    assert a is not b
    assert b.n_iterations == 3


def test_a_model_is_built_once_while_a_result_of_it_lives():
    model = skewed_model.__wrapped__()
    first = fit_ngvi(model=model, posterior="gaussian", random_seed=1, **QUIET)
    second = fit_ngvi(model=model, posterior="gaussian", random_seed=1, **QUIET)
    assert same_bits(first, second)
    assert second.compile_seconds < 0.2 * first.compile_seconds


def test_configuring_with_a_broken_option_changes_nothing():
    inference = NGVI(skewed_model(), posterior="gaussian", random_seed=1, family="diagonal")
    with pytest.raises(ValueError, match="tol is in nats"):
        inference.configure(family="full", tol=-1.0)
    assert inference.fit(0, **QUIET).record.family == "diagonal"


def test_no_model_anywhere():
    with pytest.raises(TypeError, match="No model on context stack"):
        NGVI()
    with pytest.raises(TypeError, match="No model on context stack"):
        fit_ngvi()


def test_profiling_is_refused_with_a_way_out():
    with pytest.raises(NotImplementedError, match="run_seconds"):
        NGVI(conjugate_model()).run_profiling()


@pytest.mark.parametrize("include", [True, False])
def test_include_transformed(include):
    approx = fit(0, include_transformed=include)
    assert ("rate_log__" in approx.sample(3).posterior) is include
    assert ("rate_log__" in approx.state.mean) is include


# --- how the model is evaluated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fortran"}, "backend should be one of 'auto', 'quick', 'numba', 'c', 'jax'; got 'fortran'"),
        ({"backend": "numba", "compile_kwargs": {"mode": "JAX"}}, "give one of them"),
    ],
    ids=["unknown", "twice"],
)
def test_wrong_backend(options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_compile_kwargs_arrive():
    with pytest.raises(TypeError, match="no_such_option"):
        fit(compile_kwargs={"no_such_option": 1})
    plain = fit(3)
    other_mode = fit(3, backend=None, compile_kwargs={"mode": "FAST_COMPILE"})
    np.testing.assert_allclose(other_mode.mean_flat, plain.mean_flat, rtol=1e-8)
    np.testing.assert_allclose(other_mode.sd_flat, plain.sd_flat, rtol=1e-8)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_record_and_closing_line(caplog):
    model, clock = skewed_model.__wrapped__(), time.perf_counter()  # not compiled yet
    with caplog.at_level(logging.INFO, logger="pymc.ngvi"):
        approx = fit(model=model, estimator="price")
    wall = time.perf_counter() - clock
    record = approx.record
    [line] = [r for r in caplog.records if r.name == "pymc.ngvi"]
    assert line.levelno == logging.INFO
    assert line.message == record.closing_line()
    assert re.fullmatch(r"Prior of the model, .* in [\d.]+ s; approx.summary\(\) shows it.", line.message)
    assert (record.family, record.update, record.estimator, record.step) == ("full", "natural", "price", "adaptive")
    assert record.n_gradients >= approx.n_iterations * 8
    assert record.n_gradients > record.n_hessians > 0
    assert record.n_dropped == 0
    assert 0 < record.compile_seconds < record.compile_seconds + record.run_seconds < wall


def test_each_end_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pymc.ngvi"):
        approx = fit(2)
        approx_line = approx.record.closing_line()
        with pytest.warns(ConvergenceWarning):
            approx.refine(1, progressbar=False)
    lines = [r.message for r in caplog.records if r.name == "pymc.ngvi"]
    assert lines == [approx_line, approx.record.closing_line()]


@pytest.mark.parametrize(
    ("options", "status"),
    [({"n": 1}, Status.MAX_ITERATIONS), ({"n": 10_000, "max_draws": 8}, Status.NOISE_LIMITED)],
    ids=["limit", "noise"],
)
def test_warning_says_what_happened_and_what_to_do(options, status):
    with pytest.warns(ConvergenceWarning) as caught:
        approx = fit_ngvi(model=skewed_model(), posterior="gaussian", random_seed=1, **options, **QUIET)
    [message] = [str(w.message) for w in caught]
    assert approx.status is status
    assert all(part in message for part in (status.label, status.sentence, status.cure))
    assert issubclass(ConvergenceWarning, UserWarning)


def _line():
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize("how", ["pm.fit", "instance", "fit_ngvi", "NGVI.fit", "refine", "inference.refine"])
def test_warning_points_at_the_caller(how):
    model, inference = skewed_model(), NGVI(skewed_model(), posterior="gaussian", random_seed=1)
    if "refine" in how:
        inference.fit(0, **QUIET)
    calls = {
        "pm.fit": lambda: (_line(), pm.fit(1, "ngvi", model, **QUIET)),
        "instance": lambda: (_line(), pm.fit(1, method=inference, **QUIET)),
        "fit_ngvi": lambda: (_line(), fit_ngvi(1, model=model, **QUIET)),
        "NGVI.fit": lambda: (_line(), inference.fit(1, **QUIET)),
        "refine": lambda: (_line(), inference.approx.refine(1, progressbar=False)),
        "inference.refine": lambda: (_line(), inference.refine(1, progressbar=False)),
    }
    with pytest.warns(ConvergenceWarning) as caught:
        line, _ = calls[how]()
    [warning] = caught
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_warning_points_at_a_caller_whose_name_begins_like_ours():
    code = compile("def study(fit, model):\n    fit(1, model=model, progressbar=False)\n", "study.py", "exec")
    namespace = {"__name__": "pymc_ngvi_study"}
    exec(code, namespace)
    with pytest.warns(ConvergenceWarning) as caught:
        namespace["study"](fit_ngvi, skewed_model())
    assert [(w.filename, w.lineno) for w in caught] == [("study.py", 2)]


def test_the_family_found_for_the_model_is_no_other_one_when_options_change():
    """Nodes of the approximation before the fit stay those of the result."""
    with pm.Model():
        b = pm.Normal("b", 0.0, pm.HalfNormal("sd", 1.0), shape=50)
        pm.Normal("y", b, 1.0, observed=np.linspace(-2.0, 2.0, 50))
        inference = NGVI(random_seed=1, posterior="gaussian")
    approx = inference.approx
    structure = approx.q.structure
    assert (structure.depth[structure.part] == 0).sum() == 1
    inference.configure(tol=0.1)
    assert inference.approx is approx
    assert inference.fit(progressbar=False) is approx
