"""`pm.fit` with the method "ngvi": what it takes over, and what it leaves alone."""

import functools
import inspect
import itertools
import re
import subprocess
import sys

import numpy as np
import pymc as pm
import pymc.variational
import pymc.variational.inference
import pytest

from gaussian import stop_at

import pymc_ngvi

from pymc_ngvi import NGVI, NGVIApproximation, fit_ngvi, register
from pymc_ngvi import inference as inference_module

PLACES = (pymc, pymc.variational, pymc.variational.inference)
pytestmark = pytest.mark.usefixtures("_compiled_once")

QUIET = {"progressbar": False, "backend": "quick"}


@functools.cache
def normal_model():
    with pm.Model() as model:
        pm.Normal("x", 1.0, 2.0, shape=2)
    return model


@functools.cache
def skewed_model():
    """Not Gaussian: the result depends on the draws, hence on the seed."""
    with pm.Model() as model:
        pm.Gamma("rate", 2.0, 3.0)
    return model


@pytest.fixture(autouse=True)
def _registered():
    """Leave PyMC as the import of the package left it, whatever the test does."""
    original = pm.fit.__wrapped__
    yield
    for place in PLACES:
        place.fit = original
    register()


@pytest.fixture
def spy():
    """Put a function that only reports its arguments in the place of PyMC's own fit, and register around it."""
    original = pm.fit.__wrapped__
    calls = []

    @functools.wraps(original)
    def fake(*args, **kwargs):
        calls.append((args, kwargs))
        return calls

    for place in PLACES:
        place.fit = fake
    register()
    return calls


# --- being there --------------------------------------------------------------------------------


def test_registering_again_changes_nothing():
    before = pm.fit
    register()
    register()
    assert pm.fit is before
    assert not hasattr(pm.fit.__wrapped__, "__wrapped__"), "PyMC's own function is wrapped once"


def test_signature_and_names_are_kept():
    original = pm.fit.__wrapped__
    assert inspect.signature(pm.fit) == inspect.signature(original)
    for attribute in ("__name__", "__module__", "__qualname__"):
        assert getattr(pm.fit, attribute) == getattr(original, attribute)


def test_documentation_is_pymc_s_with_our_method_and_options():
    theirs, both = inspect.getdoc(pm.fit.__wrapped__), inspect.getdoc(pm.fit)
    listed, ours = both.split('\n\nOptions of method="ngvi"\n')
    added = [line for line in listed.splitlines() if line not in theirs.splitlines()]
    assert [line.split()[:2] for line in added] == [["-", "'ngvi'"]]
    assert listed.replace(added[0] + "\n", "") == theirs
    entries = [line.split(" :")[0].split(", ") for line in ours.splitlines() if re.match(r"\w[\w, ]* : ", line)]
    options = {*inspect.signature(NGVI).parameters, *inspect.signature(NGVI.fit).parameters}
    assert sorted(itertools.chain(*entries)) == sorted(options - {"self", "model", "n", "unknown"})


def test_import_order():
    """A name taken from PyMC before the import keeps PyMC's own function, one taken after it does not."""
    script = """
from pymc import fit as early
import pymc as pm
import pymc_ngvi
from pymc import fit as late
assert late is pm.fit is not early
assert early is pm.fit.__wrapped__
with pm.Model():
    pm.Normal("x")
    try:
        early(1, method="ngvi")
    except KeyError as error:
        assert "method should be one of" in str(error)
    else:
        raise AssertionError("PyMC's own function took the method")
    print(pymc_ngvi.fit_ngvi(0, progressbar=False).status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "not started"


# --- what passes through ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param((7, "advi"), {}, id="positional"),
        pytest.param((), {"method": "ADVI", "n": 3, "obj_n_mc": 5}, id="capitals"),
        pytest.param((9,), {"method": "fullrank_advi", "inf_kwargs": {"random_seed": 1}, "start": {}}, id="inf_kwargs"),
        pytest.param((), {"method": "svgd", "random_seed": None, "score": False}, id="given-none"),
        pytest.param((), {"method": 3}, id="no-method-at-all"),
        pytest.param((1, "ngvi", None, 2, None, None, None, "too many"), {}, id="too-many-arguments"),
    ],
)
def test_other_calls_arrive_untouched(spy, args, kwargs):
    assert pm.fit(*args, **kwargs) is spy
    [(got_args, got_kwargs)] = spy
    assert got_args == args
    assert got_kwargs == kwargs
    assert all(got_kwargs[name] is value for name, value in kwargs.items())


def test_instances_of_other_methods_arrive_untouched(spy):
    with skewed_model():
        advi = pm.ADVI(random_seed=1)
    assert pm.fit(3, advi, random_seed=5, start={"rate": 1.0}, obj_n_mc=2) is spy
    assert spy == [((3, advi), {"random_seed": 5, "start": {"rate": 1.0}, "obj_n_mc": 2})]


def test_unknown_method_gives_the_same_error():
    messages = []
    for fit in (pm.fit, pm.fit.__wrapped__):
        with pytest.raises(KeyError, match="method should be one of") as error:
            fit(3, method="laplace", model=normal_model())
        messages.append(sorted(str(error.value)))  # PyMC prints a set: its order varies
    assert messages[0] == messages[1]
    with pytest.raises(KeyError, match="Unknown method 'NVGI': did you mean 'ngvi'"):
        pm.fit(3, method="NVGI", model=normal_model())


# --- what is ours -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngvi", "NGVI", "NgVi"])
def test_name_in_any_case(name):
    with normal_model():
        approx = pm.fit(method=name, random_seed=1, **QUIET)
    assert type(approx) is NGVIApproximation
    # The posterior is N(1, 4): exact for a Gaussian q.
    np.testing.assert_allclose(approx.mean_flat, 1.0, rtol=1e-10)
    np.testing.assert_allclose(approx.sd_flat, 2.0, rtol=1e-10)


def test_model_of_the_context_or_given():
    other = normal_model()
    with skewed_model() as model:
        assert pm.fit(0, method="ngvi", **QUIET).model is model
        assert pm.fit(0, method="ngvi", model=other, **QUIET).model is other
        assert pm.fit(0, "ngvi", other, **QUIET).model is other
    with pytest.raises(TypeError, match="No model on context stack"):
        pm.fit(0, method="ngvi", **QUIET)


def test_the_class_does_what_the_name_does():
    """Options of the constructor and of the fit go where they belong; a subclass is made by itself."""

    class Fewer(NGVI):
        def fit(self, n=10_000, *args, **kwargs):
            return super().fit(min(n, 2), *args, **kwargs)

    options = {"random_seed": 1, "start_sigma": 1.0, "callbacks": [stop_at(2)], **QUIET}
    by_name = pm.fit(method="ngvi", model=skewed_model(), **options)
    by_class = pm.fit(method=NGVI, model=skewed_model(), inf_kwargs={"family": "full"}, **options)
    np.testing.assert_array_equal(by_class.mean_flat, by_name.mean_flat)
    with skewed_model(), pytest.warns(pymc_ngvi.ConvergenceWarning):
        assert pm.fit(method=Fewer, random_seed=1, **QUIET).n_iterations == 2
    with pytest.raises(TypeError, match="does not know the option 'famly': did you mean 'family'"):
        pm.fit(0, NGVI, normal_model(), famly="full")


@pytest.mark.parametrize("seed", [1, 2])
def test_instance_honours_seed_and_start(seed):
    """PyMC drops both where an instance is given; here they count as if given to the constructor."""
    options = {"start": {"rate": 3.0}, "start_sigma": 0.5, "callbacks": [stop_at(2)], "estimator": "price", **QUIET}
    inference = NGVI(skewed_model(), random_seed=99, start={"rate": 0.1})
    approx = pm.fit(method=inference, random_seed=seed, **options)
    expected = fit_ngvi(model=skewed_model(), random_seed=seed, **options)
    other = fit_ngvi(model=skewed_model(), random_seed=99, **options)
    np.testing.assert_array_equal(approx.mean_flat, expected.mean_flat)
    np.testing.assert_array_equal(approx.sd_flat, expected.sd_flat)
    assert other.mean_flat != expected.mean_flat
    at_start = pm.fit(0, method=NGVI(skewed_model()), start={"rate": 3.0}, **QUIET)
    np.testing.assert_allclose(at_start.mean_flat, np.log(3.0), rtol=1e-12)


# --- options given twice ----------------------------------------------------------------------------------------------

START = {"x": np.array([3.0, 4.0])}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"start": START}, id="direct"),
        pytest.param({"inf_kwargs": {"start": START}}, id="inf_kwargs"),
        pytest.param({"start": None, "inf_kwargs": {"start": START}}, id="none-beside"),
        pytest.param({"start": START, "inf_kwargs": None}, id="no-inf_kwargs"),
    ],
)
def test_start_arrives(options):
    approx = pm.fit(0, "ngvi", normal_model(), **options, **QUIET)
    np.testing.assert_array_equal(approx.mean_flat, [3.0, 4.0])


@pytest.mark.parametrize("method", ["name", "instance"])
def test_an_option_is_given_once(method):
    model = normal_model()
    chosen = "ngvi" if method == "name" else NGVI(model)
    with pytest.raises(ValueError, match="'start' is given directly and in inf_kwargs"):
        pm.fit(0, chosen, model, start=START, inf_kwargs={"start": START, "n_draws": 8}, **QUIET)


def test_nothing_is_computed_before_options_are_checked(monkeypatch):
    """A misspelt option must not cost the time that compiling takes."""
    monkeypatch.setattr(inference_module, "LogDensity", lambda *_: pytest.fail("the model was compiled first"))
    with pytest.raises(ValueError, match="Unknown family 'ful'"):
        pm.fit(method="ngvi", model=normal_model(), family="ful")
    with pytest.raises(ValueError, match="n is the maximum number of iterations"):
        pm.fit(-1, method="ngvi", model=normal_model())
