"""Many fits of one model: each is the fit alone, whatever the processes; failures, interrupts and bad data."""

import gc
import importlib
import logging
import os
import re
import threading
import warnings
import weakref

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pytensor.compile.maker import FunctionMaker

import pymc_ngvi

from pymc_ngvi.core.messages import Reason, Unavailable
from pymc_ngvi.many import N_PILOTS, Fitter
from pymc_ngvi.posteriors import kinds as trees

fitting = importlib.import_module("pymc_ngvi.many")  # a function has its name

N_GROUPS = 8
GROUP = np.repeat(np.arange(N_GROUPS), 6)
QUIET = {"random_seed": 3, "progressbar": False}
KINDS = ("nested", "exact")


def intercepts():
    with pm.Model(coords={"group": [f"g{k}" for k in range(N_GROUPS)]}) as model:
        y = pm.Data("y_data", np.ones(len(GROUP)))
        mu, sd = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", mu, sd, dims="group")
        pm.Deterministic("twice", 2.0 * mu)
        pm.Normal("y", u[GROUP], 1.0, observed=y)
    return model


def data_sets(n, seed=1):
    rng = np.random.default_rng(seed)
    return [{"y_data": 0.3 * k + rng.normal(size=N_GROUPS)[GROUP] + rng.normal(size=len(GROUP))} for k in range(n)]


def mean_of_normal(size=5):
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0)
        pm.Normal("y", mu, 1.0, observed=np.ones(size))
    return model


def without_seconds(many):
    return many.dataset.drop_vars("seconds")


@pytest.fixture(scope="module")
def many():
    return pymc_ngvi.fit_many(intercepts(), data_sets(6), posterior="gaussian", **QUIET)


# --- the table --------------------------------------------------------------------------------------------------------


def test_means_and_limits_are_those_of_known_posteriors():
    """Of a normal mean: n ybar / (n + 1 / 9), with variance 1 / (n + 1 / 9)."""
    y = np.random.default_rng(2).normal(1.0, 1.0, (6, 5))
    found = pymc_ngvi.fit_many(mean_of_normal(), [{"y": row} for row in y], draws=4_000, prob=0.5, **QUIET).dataset.mu
    precision = 5.0 + 1.0 / 9.0
    mean, sd = y.sum(axis=1) / precision, precision**-0.5
    error = 4.0 * sd / np.sqrt(4_000)
    np.testing.assert_allclose(found.sel(statistic="mean"), mean, atol=error)
    np.testing.assert_allclose(found.sel(statistic="sd"), sd, atol=error)
    # The density at a quartile is .318 / sd: its standard error is sqrt(.25 * .75) / .318 sd / sqrt(n).
    for name, z in (("lower", -0.6745), ("upper", 0.6745)):
        np.testing.assert_allclose(found.sel(statistic=name), mean + z * sd, atol=1.4 * error)


def test_the_table_has_variables_deterministics_and_what_is_said_of_each_fit(many):
    table = many.dataset
    assert dict(table.sizes) == {"fit": 6, "statistic": 4, "group": N_GROUPS}
    assert list(table.group.values[:2]) == ["g0", "g1"]
    assert {"mu", "sd", "u", "twice"} <= set(table.data_vars)
    assert "sd_log__" not in table
    np.testing.assert_allclose(table.twice, 2.0 * table.mu, rtol=1e-12)
    assert set(table.posterior.values) == {"gaussian"}
    assert set(table.verdict.values) == {"not judged"}
    assert table.searched.values.tolist() == [True] * N_PILOTS + [False] * (6 - N_PILOTS)
    said = ["Not searched for other modes: 3 fits were" in sentence for sentence in table.sentence.values]
    assert said == (~table.searched.values).tolist()
    assert (np.diff(table.mu.sel(statistic="mean")) > -1.0).all()
    assert np.isnan(table.log_marginal_likelihood).all()
    assert len(set(table.seed.values.tolist())) == 6
    assert repr(many) == "ManyFits(6 fits: 6 not judged)"


def test_exact_posteriors_have_a_verdict_and_a_marginal_likelihood():
    """Of a binomial probability with a uniform prior: each of the n + 1 numbers of successes is as likely."""
    with pm.Model() as model:
        p = pm.Beta("p", 1.0, 1.0)
        pm.Binomial("y", 4, p, observed=np.array(1))
    found = pymc_ngvi.fit_many(model, [{"y": np.array(k)} for k in range(5)], **QUIET).dataset
    assert set(found.posterior.values) == {"exact"}
    assert set(found.verdict.values) == {"exact"}
    assert all("Exact up to Monte Carlo error" in sentence for sentence in found.sentence.values)
    error = found.log_marginal_likelihood - np.log(0.2)
    assert (abs(error) < 5.0 * found.log_marginal_likelihood_se + 1e-3).all()
    np.testing.assert_allclose(found.p.sel(statistic="mean"), (np.arange(5) + 1) / 6, atol=4.0 * 0.2 / 1e3**0.5)


def test_a_variable_with_the_name_of_a_figure_keeps_it():
    with pm.Model() as model:
        elbo = pm.Normal("elbo", 0.0, 3.0)
        pm.Normal("y", elbo, 1.0, observed=np.ones(5))
    many = pymc_ngvi.fit_many(model, [{"y": np.ones(5)}], **QUIET)
    assert many.dataset.elbo.dims == ("fit", "statistic")
    assert many.dataset.fit_elbo.dims == ("fit",)
    assert "1 exact" in repr(many)


# --- each fit is one alone --------------------------------------------------------------------------------------------


def test_the_first_fit_is_that_of_pm_fit(many):
    model, [first] = intercepts(), data_sets(1)
    pm.set_data(first, model=model)
    seed = int(many.dataset.seed[0])
    alone = pymc_ngvi.fit_ngvi(model, posterior="gaussian", random_seed=seed, progressbar=False)
    assert alone.elbo.value == float(many.dataset.elbo[0])


@pytest.fixture(scope="module")
def sampled():
    """Nested posteriors, whose closed form begins with a mode, and exact ones."""
    return {kind: pymc_ngvi.fit_many(intercepts(), data_sets(6), posterior=kind, **QUIET) for kind in KINDS}


def test_processes_give_the_same_bits(sampled):
    other = pymc_ngvi.fit_many(intercepts(), data_sets(6), posterior="nested", n_jobs=2, **QUIET)
    xr.testing.assert_identical(without_seconds(other), without_seconds(sampled["nested"]))


@pytest.mark.parametrize("posterior", ["gaussian", *KINDS])
def test_what_came_before_does_not_matter(many, sampled, posterior):
    data, whole = data_sets(6), ({"gaussian": many} | sampled)[posterior]
    shorter = pymc_ngvi.fit_many(intercepts(), [*data[:4], data[0], data[5]], posterior=posterior, **QUIET)
    xr.testing.assert_identical(without_seconds(shorter).sel(fit=[3, 5]), without_seconds(whole).sel(fit=[3, 5]))


@pytest.mark.parametrize("posterior", KINDS)
def test_posteriors_that_begin_from_that_of_other_data_are_those_of_fits_alone(sampled, posterior):
    """Means within the errors of 1,000 draws, of an effective size of 420 in the hyperparameters."""
    model, data, table = intercepts(), data_sets(6), sampled[posterior].dataset
    assert set(table.verdict.values) == {"exact"}
    assert set(table.posterior.values) == {posterior}
    pm.set_data(data[5], model=model)
    alone = pymc_ngvi.fit_ngvi(model, posterior=posterior, random_seed=7, progressbar=False)
    for name in ("mu", "sd", "u"):
        draws = alone.sample(4_000, random_seed=1).posterior[name]
        mean, sd = draws.mean(("chain", "draw")), draws.std(("chain", "draw"))
        found = table[name].sel(fit=5)
        assert float(abs((found.sel(statistic="mean") - mean) / sd).max()) < 4.5 * (1_000**-0.5 + 420**-0.5 / 2)
        assert float(abs(found.sel(statistic="sd") / sd - 1.0).max()) < 4.5 * 0.5 * (1_000**-0.5 + 420**-0.5)


@pytest.mark.parametrize("posterior", KINDS)
def test_nothing_is_compiled_for_later_data(posterior, monkeypatch):
    compiled, counts, begin = [], [], FunctionMaker.__init__

    def noted(self, *args, **options):
        compiled.append(1)
        begin(self, *args, **options)

    def source():
        for entry in data_sets(6):
            counts.append(len(compiled))
            yield entry

    monkeypatch.setattr(FunctionMaker, "__init__", noted)
    pymc_ngvi.fit_many(intercepts(), source(), posterior=posterior, **QUIET)
    assert len(compiled) == counts[4]


def test_where_that_leads_nowhere_a_fit_is_one_alone(monkeypatch):
    tried, exact_posterior = [], trees.exact_posterior

    def leads_nowhere(*arguments, of_other_data):
        if of_other_data:
            tried.append(1)
            raise Unavailable(Reason.HOPELESS, "there is no integral where it begins")
        return exact_posterior(*arguments)

    monkeypatch.setattr(trees, "exact_posterior", leads_nowhere)
    model, data = intercepts(), data_sets(4)
    found = pymc_ngvi.fit_many(model, data, posterior="exact", **QUIET).dataset
    assert len(tried) == 1
    assert found.verdict.values.tolist() == ["exact"] * 4
    pm.set_data(data[3], model=model)
    alone = pymc_ngvi.fit_ngvi(model, posterior="exact", random_seed=int(found.seed[3]), progressbar=False)
    assert abs(float(found.log_marginal_likelihood[3]) - alone.log_marginal_likelihood.value) < 0.02


@pytest.mark.parametrize("i", [0, 4])
def test_a_fit_is_made_again_with_the_same_bits(many, i):
    approx = many.approx(i)
    assert approx.elbo.value == float(many.dataset.elbo[i])
    np.testing.assert_array_equal(approx.model["y_data"].get_value(), data_sets(6)[i]["y_data"])
    with pytest.raises(IndexError, match="no fit 6: they are numbered from 0 to 5"):
        many.approx(6)
    with pytest.raises(ValueError, match=f"The data of fit {i} are not what they were"):
        many.approx(i, {"y_data": np.zeros(len(GROUP))})


def test_the_model_has_its_own_data_back():
    model = intercepts()
    before = model["y_data"].get_value()
    pymc_ngvi.fit_many(model, data_sets(1), posterior="gaussian", **QUIET)
    np.testing.assert_array_equal(model["y_data"].get_value(), before)


def test_fits_in_several_threads_leave_log_and_warnings_as_they_were():
    """Each goes on for a while after the other one has begun, and ends before or after it."""
    inside, done = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def fit(k):
        with fitting._QUIETLY:
            inside[k].set()
            assert done[k].wait(60)

    filters = list(warnings.filters)
    threads = [threading.Thread(target=fit, args=(k,)) for k in range(2)]
    for k, thread in enumerate(threads):
        thread.start()
        assert inside[k].wait(60)
    for k, thread in enumerate(threads):
        assert fitting.logger.level == logging.ERROR
        assert warnings.filters[0][:3:2] == ("ignore", pymc_ngvi.ConvergenceWarning)
        done[k].set()
        thread.join()
    assert fitting.logger.level == logging.NOTSET
    assert warnings.filters == filters


# --- data of other sizes, and other places for them -------------------------------------------------------------------


def regression():
    with pm.Model() as model:
        x, y = pm.Data("x", np.arange(4.0)), pm.Data("y_data", np.ones(4))
        b = pm.Normal("b", 0.0, 2.0)
        pm.Normal("y", b * x, 1.0, observed=y)
    return model


def test_sizes_may_differ():
    rng = np.random.default_rng(4)
    data = [{"x": x, "y_data": 0.5 * x} for x in (rng.normal(size=n) for n in (4, 9, 4, 6, 4))]
    found = pymc_ngvi.fit_many(regression(), data, draws=4_000, **QUIET).dataset.b
    precision = np.array([entry["x"] @ entry["x"] for entry in data]) + 0.25
    np.testing.assert_allclose(found.sel(statistic="sd"), precision**-0.5, rtol=4.0 / np.sqrt(8_000))


def sold(family, *, as_data):
    """Counts of three shops, whose values are an array or data."""
    with pm.Model(coords={"shop": ["a", "b", "c"]}) as model:
        shop, y = pm.Data("shop_index", np.array([0, 1, 2, 0])), np.array([1, 2, 3, 4])
        y = pm.Data("y_data", y) if as_data else y
        rate = pm.math.exp(pm.Normal("log_rate", pm.Normal("mu", 0, 2), 1.0, dims="shop"))[shop]
        if family == "poisson":
            pm.Poisson("y", rate, observed=y)
        else:
            pm.Censored("y", pm.Poisson.dist(rate), lower=None, upper=5, observed=y)
    return model


@pytest.mark.parametrize("family", ["poisson", "censored"])
def test_sizes_of_observed_arrays_may_differ(family):
    """As those of data may, with the same bits; data may have the name of what is observed."""
    rng = np.random.default_rng(1)
    data = [{"shop_index": rng.integers(0, 3, n), "y": np.minimum(rng.poisson(2, n), 5)} for n in (5, 4, 9, 5)]
    of_array, of_data = (
        pymc_ngvi.fit_many(sold(family, as_data=k), data, posterior="gaussian", **QUIET).dataset for k in (False, True)
    )
    xr.testing.assert_identical(of_array.drop_vars("seconds"), of_data.drop_vars("seconds"))
    assert not of_array.error.values.any()
    with sold(family, as_data=True):
        pm.set_data({"shop_index": data[2]["shop_index"], "y_data": data[2]["y"]})
        alone = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
    np.testing.assert_allclose(of_array.elbo[2], alone.elbo.value, atol=0.01)


def test_elements_that_are_other_rows_with_other_data_are_found():
    """Data say which of two functions of the parameters a mean is."""
    with pm.Model() as model:
        x, a, b = pm.Data("x", np.ones(5)), pm.Normal("a"), pm.HalfNormal("b")
        pm.Normal("y", pm.math.switch(x > 0.0, pm.math.exp(a), a * b), 1.0, observed=np.ones(5))
    data = [{"x": np.where(np.arange(5) < k, -1.0, 1.0)} for k in (1, 3)]
    found = pymc_ngvi.fit_many(model, data, posterior="gaussian", **QUIET).dataset
    alone = pymc_ngvi.fit_many(model, data[1:], posterior="gaussian", **QUIET).dataset
    assert abs(float(found.elbo[1] - alone.elbo[0])) < 0.01


def test_lengths_on_which_other_variables_depend_stay():
    with pm.Model() as model:
        y = pm.Normal("y", pm.Normal("b", 0.0, 1.0), 1.0, observed=np.ones(4))
        pm.Deterministic("largest", pm.math.max(y))
    data = [{"y": np.zeros(4)}, {"y": np.zeros(3)}]
    with pytest.warns(UserWarning, match="1 of 2 fits failed"):
        found = pymc_ngvi.fit_many(model, data, **QUIET).dataset
    assert found.error.values[0] == ""
    assert "'y' has shape (3,); its shape is fixed in the model, (4,). Give its" in str(found.error.values[1])


def test_labels_of_dims_join_groups_that_differ():
    with pm.Model(coords={"shop": ["a", "b"]}) as model:
        y = pm.Data("y_data", np.ones(2), dims="shop")
        u = pm.Normal("u", 0.0, 1.0, dims="shop")
        pm.Normal("y", u, 1.0, observed=y)
    labels = [["a", "b"], ["b", "c", "d"], ["a", "b"]]
    data = [{"y_data": np.arange(1.0, 1.0 + len(shops)), "shop": shops} for shops in labels]
    found = pymc_ngvi.fit_many(model, data, draws=2_000, **QUIET).dataset.u.sel(statistic="mean")
    nan, error = np.nan, 4.0 * 0.71 / np.sqrt(2_000)
    np.testing.assert_allclose(
        found.sel(shop=["a", "b", "c", "d"]),
        [[0.5, 1.0, nan, nan], [nan, 0.5, 1.0, 1.5], [0.5, 1.0, nan, nan]],
        atol=error,
    )
    assert list(model.coords["shop"]) == ["a", "b"]
    with pytest.raises(ValueError, match="new coord values for the shop dimension are required"):
        pymc_ngvi.fit_many(model, [{"y_data": np.ones(3)}], **QUIET)


def test_a_generator_is_read_as_it_is_needed():
    read = []

    def source():
        for k in range(4):
            read.append(k)
            yield {"y": np.full(5, float(k))}

    many = pymc_ngvi.fit_many(mean_of_normal(), source(), **QUIET)
    assert len(many) == 4
    with pytest.raises(ValueError, match="from an iterator, which is at its end"):
        many.approx(1)
    assert many.approx(1, {"y": np.ones(5)}).elbo.value == float(many.dataset.elbo[1])


def test_draws_are_written_where_they_are_wanted(tmp_path):
    data = [{"y": np.full(5, float(k))} for k in range(2)]
    many = pymc_ngvi.fit_many(mean_of_normal(), data, draws=50, draws_to=tmp_path / "draws", **QUIET)
    files = sorted((tmp_path / "draws").iterdir())
    assert [file.name for file in files] == ["fit_000000.nc", "fit_000001.nc"]
    with xr.open_datatree(files[1]) as tree:
        assert tree.posterior["mu"].shape == (4, 13)
        assert abs(float(tree.posterior["mu"].mean() - many.dataset.mu.sel(fit=1, statistic="mean"))) < 0.5


def test_draws_go_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(Fitter, "row", None)  # before any fit
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"draws_to should be a folder; .* is a file"):
        pymc_ngvi.fit_many(mean_of_normal(), [{"y": np.ones(5)}], draws_to=tmp_path / "file", **QUIET)


# --- memory ---


def test_nothing_is_kept_of_a_fit_but_its_row(monkeypatch):
    """Neither its approximation nor its data; those of the first fits apart, of which others may start from one."""
    approx, fits, given = Fitter.approx, [], []

    def noted(self, *args):
        result = approx(self, *args)
        fits.append(weakref.ref(result))
        return result

    def source():
        for entry in data_sets(6):
            given.append(weakref.ref(entry["y_data"]))
            yield entry

    monkeypatch.setattr(Fitter, "approx", noted)
    many = pymc_ngvi.fit_many(intercepts(), source(), posterior="gaussian", **QUIET)
    gc.collect()
    assert len(many) == len(fits) == len(given) == 6
    assert [fit() is None for fit in fits[1:-1]] == [True] * 4
    assert [array() is None for array in given[1:-1]] == [True] * 4


# --- other modes ------------------------------------------------------------------------------------------------------


def of_a_square():
    """There are two modes where y is above 0."""
    with pm.Model() as model:
        y = pm.Data("y_data", np.array(4.0))
        x = pm.Normal("x", 0.5, 3.0)
        pm.Normal("y", x**2, 0.5, observed=y)
    return model


@pytest.mark.parametrize("posterior", ["gaussian", "auto"])
def test_where_the_first_fits_find_other_modes_each_is_searched(posterior):
    data = [{"y_data": np.array(value)} for value in (4.0, 5.0, 6.0, 7.0)]
    found = pymc_ngvi.fit_many(of_a_square(), data, posterior=posterior, **QUIET).dataset
    assert found.other_modes.values[:N_PILOTS].any()
    assert found.searched.values.all()


def test_fits_that_were_not_searched_are_not_judged_where_a_later_one_has_other_modes():
    data = [{"y_data": np.array(4.0 if k == 20 else -4.0)} for k in range(22)]
    with pytest.warns(UserWarning, match=r"1 of 4 fits that were searched .* have some \(fit 20 is"):
        found = pymc_ngvi.fit_many(of_a_square(), data, judge=True, **QUIET).dataset
    assert found.other_modes.values.tolist() == [k == 20 for k in range(22)]
    searched = [k in (0, 1, 2, 20) for k in range(22)]
    assert found.searched.values.tolist() == searched
    assert set(found.verdict.values[[k for k in range(20) if searched[k]]]) <= {"exact", "reliable"}
    assert {v for v, s in zip(found.verdict.values, searched, strict=True) if not s} == {"not judged"}
    assert "which 1 of 4 fits have" in str(found.sentence.values[5])


def test_each_fit_is_searched_where_that_is_asked_for():
    found = pymc_ngvi.fit_many(intercepts(), data_sets(4), posterior="gaussian", search="each", **QUIET).dataset
    assert found.searched.values.all()


# --- failures ---------------------------------------------------------------------------------------------------------


BAD = {
    "a name more": ({"y_data": np.ones(48), "z": 1}, "has 'z', which the first has not"),
    "another name": ({"z": np.ones(48)}, "lacks 'y_data' and has 'z'"),
    "axes": ({"y_data": np.ones((48, 1))}, r"has 2 axes, shape \(48, 1\); in the model it has 1 axis"),
    "ragged": ({"y_data": [[1.0, 2.0], [3.0]]}, "is ragged: its rows have lengths 1, 2"),
    "text": ({"y_data": ["a"] * 48}, "should be numbers"),
    "length": ({"y_data": np.ones(47)}, r"the data have shapes y_data \(47,\)"),
    "no dict": (np.ones(48), "should be a dict of arrays by name"),
    "not finite": ({"y_data": np.full(48, np.nan)}, "nan|finite"),
}


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_failures_are_entries_with_their_reason_and_end_nothing_else(many, n_jobs):
    good = data_sets(6)
    data = [*good[:4], *(entry for entry, _ in BAD.values()), good[5]]
    if n_jobs == 1:
        data[1] = {"y_data": np.ones(3)}
    with pytest.warns(UserWarning, match=rf"{len(BAD) + (n_jobs == 1)} of 13 fits failed"):
        found = pymc_ngvi.fit_many(intercepts(), data, posterior="gaussian", n_jobs=n_jobs, **QUIET)
    for error, (_, pattern) in zip(found.dataset.error.values[4:-1], BAD.values(), strict=True):
        assert re.search(pattern, error), error
    assert np.isnan(found.dataset.mu[4:-1]).all()
    assert np.isfinite(found.dataset.mu[[0, 3, -1]]).all()
    if n_jobs == 2:  # the third fit starts as it does elsewhere
        assert float(found.dataset.elbo[3]) == float(many.dataset.elbo[3])


class EndsItsProcess:
    """Data that take the process with them that reads them."""

    def __array__(self, dtype=None, copy=None):
        os._exit(1)


@pytest.mark.slow
def test_a_process_that_ends_takes_no_other_fit_with_it():
    data = [{"y": np.full(5, float(k))} for k in range(6)]
    whole = pymc_ngvi.fit_many(mean_of_normal(), data, **QUIET)
    data[4] = {"y": EndsItsProcess()}
    with pytest.warns(UserWarning, match="1 of 6 fits failed .4.: .* The process ended during this fit"):
        found = pymc_ngvi.fit_many(mean_of_normal(), data, n_jobs=2, **QUIET)
    xr.testing.assert_identical(without_seconds(found).drop_sel(fit=4).mu, without_seconds(whole).drop_sel(fit=4).mu)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "data is empty: give a dict of arrays for each fit"),
        ({"y": np.ones(5)}, TypeError, r"a dict, which is the data of one fit: write \[data\]"),
        (3, TypeError, "should be an iterable of dicts, one for each fit; got 3"),
        ([{"z": np.ones(5)}], ValueError, "has 'z', which the model has not.*Valid: 'y'"),
        ([{"mu": 1.0}], ValueError, "'mu', which is neither a pm.Data nor an observed variable"),
        ([{}], ValueError, "names no data"),
        (
            [{"y": np.ones((5, 1))}],
            ValueError,
            r"All 1 fits failed.*has 2 axes, shape \(5, 1\); in the model it has 1 axis",
        ),
    ],
)
def test_data_that_are_none_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        pymc_ngvi.fit_many(mean_of_normal(), data, **QUIET)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_jobs": 0}, ValueError, "n_jobs should be the number of processes, at least 1, or -1"),
        ({"prob": 94}, ValueError, "prob should be between 0 and 1; got 94"),
        ({"search": "none"}, ValueError, "search should be 'first' or 'each'; got 'none'"),
        ({"var_names": ["my"]}, ValueError, "var_names has 'my', which the model has not: Valid: 'mu'"),
        ({"famly": "full"}, TypeError, "did you mean 'family'"),
        ({"shards": 1}, TypeError, "Many fits do not take shards: they are those"),
        ({"family": "fall"}, ValueError, "family"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_fit(options, error, message, monkeypatch):
    monkeypatch.setattr(Fitter, "row", None)
    with pytest.raises(error, match=message):
        pymc_ngvi.fit_many(mean_of_normal(), [{"y": np.ones(5)}], **{**QUIET, **options})


def test_a_model_comes_first():
    with pytest.raises(TypeError, match="fit_many takes a model first"):
        pymc_ngvi.fit_many([{"y": 1}], mean_of_normal())


def test_an_interrupt_keeps_what_is_done():
    def source():
        for k in range(5):
            if k == 3:
                raise KeyboardInterrupt
            yield {"y": np.full(5, float(k))}

    with pytest.warns(UserWarning, match="Interrupted from the keyboard: 3 fits were done, which are kept"):
        many = pymc_ngvi.fit_many(mean_of_normal(), source(), **QUIET)
    assert len(many) == 3
    assert np.isfinite(many.dataset.mu).all()


def test_data_that_can_not_be_read_on_lose_no_fit_that_was_done():
    def source(n):
        yield from ({"y": np.full(5, float(k))} for k in range(n))
        raise OSError("no such file")

    with pytest.warns(
        UserWarning, match="data can't be read on: OSError: no such file. 4 fits were done, which are kept"
    ):
        many = pymc_ngvi.fit_many(mean_of_normal(), source(4), **QUIET)
    assert np.isfinite(many.dataset.mu).all()
    with pytest.raises(OSError, match="no such file"):
        pymc_ngvi.fit_many(mean_of_normal(), source(0), **QUIET)


def test_the_model_of_a_fit_can_be_copied():
    """Whole numbers: `pm.Data` may hold them in another type than the variable has."""
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=pm.Normal("a"), observed=np.array([0, 1, 1]))
    approx = pymc_ngvi.fit_many(model, [{"y": np.array([1, 1, 0])}], **QUIET).approx(0)
    copied = approx.model.copy()
    assert copied.rvs_to_values[copied["y"]].eval().tolist() == [1, 1, 0]
