"""Fits to data in batches: equal to fits to all of the data; sources of all kinds, and what is wrong with some."""

import itertools
import warnings

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

from pymc_ngvi import Status
from pymc_ngvi.density.streams import BatchSource, Place
from pymc_ngvi.families import FullState
from pymc_ngvi.methods.sites import Quadratic, sign_of_order
from pymc_ngvi.results.diagnosis import context_of

N_ROWS, N_BATCHES = 2700, 9


class Again:
    """Batches that can be read several times, in their own order."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


class Items:
    """Batches by number; says which were read, and fails as often as it is told."""

    def __init__(self, batches, failures=()):
        self.batches, self.read, self.failures = batches, [], list(failures)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        if self.failures and len(self.read) == self.failures[0]:
            self.failures.pop(0)
            raise OSError("the disk is gone")
        self.read.append(number)
        return self.batches[number]


def split(data, n_batches=N_BATCHES):
    parts = np.array_split(np.arange(len(next(iter(data.values())))), n_batches)
    return [{name: array[rows] for name, array in data.items()} for rows in parts]


def logistic(data, total_size=N_ROWS):
    with pm.Model() as model:
        X, y = pm.Data("X", data["X"]), pm.Data("y", data["y"])
        beta = pm.Normal("beta", 0.0, 2.0, shape=4)
        pm.Bernoulli("seen", logit_p=pm.math.dot(X, beta), observed=y, total_size=total_size)
    return model


def poisson(data, total_size=N_ROWS):
    with pm.Model() as model:
        x, exposure, y = (pm.Data(name, data[name]) for name in ("x", "exposure", "y"))
        a, b = pm.Normal("a", 0.0, 5.0), pm.Normal("b", 0.0, 1.0)
        pm.Poisson("count", pm.math.exp(a + b * x + pm.math.log(exposure)), observed=y, total_size=total_size)
    return model


def normal(data, total_size=N_ROWS):
    with pm.Model() as model:
        x, y = pm.Data("x", data["x"]), pm.Data("y", data["y"])
        a, b, sd = pm.Normal("a", 0.0, 100.0), pm.Normal("b", 0.0, 10.0), pm.HalfNormal("sd", 50.0)
        pm.Normal("value", a + b * x, sd, observed=y, total_size=total_size)
    return model


def groups(data, total_size=N_ROWS):
    with pm.Model() as model:
        g, y = pm.Data("g", data["g"]), pm.Data("y", data["y"])
        mu, sd = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        effect = pm.Normal("effect", mu, sd, shape=12)
        pm.Bernoulli("seen", logit_p=effect[g], observed=y, total_size=total_size)
    return model


def data_of(model, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=N_ROWS)
    if model is logistic:
        X = np.column_stack([np.ones(N_ROWS), rng.normal(size=(N_ROWS, 3))])
        return {"X": X, "y": (rng.random(N_ROWS) < 1.0 / (1.0 + np.exp(-X @ [-0.5, 1.0, 0.3, -0.7]))).astype(int)}
    if model is poisson:
        exposure = rng.uniform(0.5, 2.0, N_ROWS)
        return {"x": x, "exposure": exposure, "y": rng.poisson(exposure * np.exp(1.0 + 0.4 * x))}
    if model is normal:
        return {"x": x, "y": 30.0 + 4.0 * x + 6.0 * rng.normal(size=N_ROWS)}
    g = rng.integers(0, 12, N_ROWS)
    return {"g": g, "y": (rng.random(N_ROWS) < 1.0 / (1.0 + np.exp(-np.linspace(-2, 2, 12)[g]))).astype(int)}


def fit(model, batches=None, **options):
    options = {"progressbar": False, "random_seed": 1, "posterior": "gaussian", **options}
    return pm.fit(method="ngvi", model=model, batches=batches, **options)


def full_fit(make, data, **options):
    return fit(make(data), **options)


def away(approx, full):
    """Return how far means are, in posterior standard deviations, and standard deviations, relatively, at most."""
    off = np.abs(approx.mean_flat - full.mean_flat) / full.sd_flat
    return off.max(), np.abs(approx.sd_flat / full.sd_flat - 1.0).max()


# --- the same as with all of the data ---


@pytest.mark.parametrize("source", [list, Again])
@pytest.mark.parametrize("make", [logistic, poisson, normal, groups])
def test_a_fit_to_batches_is_that_to_all_of_the_data(make, source):
    data = data_of(make)
    parts, full = split(data), full_fit(make, data, family="full")
    approx = fit(make(parts[0]), source(parts))
    assert approx.converged
    assert approx.record.stream.n_passes <= 3
    assert max(away(approx, full)) < 0.01
    assert abs(approx.elbo.value - full.elbo.value) < 0.01
    assert approx.record.step == "incremental"


def test_log_p_is_a_sum_of_the_prior_and_of_all_batches():
    data = data_of(logistic)
    parts = split(data)
    density, whole = fit(logistic(parts[0]), Again(parts), n=0).density, pymc_ngvi.LogDensity(logistic(data))
    theta = 0.3 * np.random.default_rng(3).standard_normal((2, density.n_dim))
    before = density.n_gradients
    for one, other in zip(density.logp_grad(theta), whole.logp_grad(theta), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
    assert density.n_gradients - before == 2  # batches do not count again
    np.testing.assert_allclose(density.logp(theta), whole.logp(theta), rtol=1e-12)


def test_rows_need_not_be_even():
    data = data_of(logistic)
    cuts = [0, 700, 1400, 1401, 2000, 2599, 2700]
    parts = [{k: v[a:b] for k, v in data.items()} for a, b in itertools.pairwise(cuts)]
    approx = fit(logistic(split(data)[0]), parts)
    assert max(away(approx, full_fit(logistic, data))) < 0.01


def test_data_in_an_order_take_more_passes_not_another_answer():
    data = data_of(logistic)
    order = np.argsort(data["X"][:, 1] + data["y"])
    parts, full = split({name: array[order] for name, array in data.items()}), full_fit(logistic, data)
    approx = fit(logistic(parts[0]), Again(parts))
    assert approx.converged
    assert max(away(approx, full)) < 0.02
    assert "ordered" in str(approx.record.stream)


@pytest.mark.parametrize("family", ["diagonal", "block"])
def test_other_families(family):
    data = data_of(normal)
    parts, full = split(data), full_fit(normal, data, family=family)
    approx = fit(normal(parts[0]), parts, family=family)
    assert type(approx.q) is type(full.q)
    assert max(away(approx, full)) < 0.03


def test_the_prior_and_other_data_count_once():
    data = data_of(normal)

    def make(data):
        model = normal(data)
        with model:
            pm.Normal("pilot", model["a"], 2.0, observed=[20.0, 21.0])
            pm.Potential("near", -((model["b"] - 3.0) ** 2))
        return model

    parts = split(data)
    approx = fit(make(parts[0]), parts)
    assert max(away(approx, full_fit(make, data))) < 0.01
    parts = [(part.variable, part.role) for part in approx.density.described_rows().parts]
    assert parts[:3] == [("pilot", "observed"), ("value", "observed"), ("near", "potential")]


def test_the_model_keeps_its_data():
    parts = split(data_of(logistic))
    model = logistic(parts[4])
    fit(model, parts)
    assert np.array_equal(model["X"].get_value(), parts[4]["X"])


# --- how batches are read ---


def test_items_are_read_in_other_orders_each_once_a_pass():
    items = Items(split(data_of(logistic)))
    approx = fit(logistic(items[0]), items)
    n_passes, read = approx.record.stream.n_passes, items.read[-N_BATCHES * approx.record.stream.n_passes :]
    passes = [read[k * N_BATCHES : (k + 1) * N_BATCHES] for k in range(n_passes)]
    assert all(sorted(each) == list(range(N_BATCHES)) for each in passes)
    assert len({tuple(each) for each in passes}) == n_passes > 1


def test_batches_that_are_others_in_each_pass():
    data, rng = data_of(logistic), np.random.default_rng(3)

    class Shuffled:
        def __iter__(self):
            order = rng.permutation(N_ROWS)
            return iter(split({name: array[order] for name, array in data.items()}))

    approx = fit(logistic(split(data)[0]), Shuffled())
    assert approx.converged
    assert approx.record.stream.is_held
    assert max(away(approx, full_fit(logistic, data))) < 0.01


def test_a_loader_of_arrays_for_the_only_data():
    data = data_of(logistic)
    whole = np.column_stack([data["X"], data["y"]])

    class Loader:
        total_size = N_ROWS

        def __len__(self):
            return N_BATCHES

        def __iter__(self):
            return iter(np.array_split(whole, N_BATCHES))

    loader = Loader()
    with pm.Model() as model:
        batch = pm.Data("batch", whole[:300])
        beta = pm.Normal("beta", 0.0, 2.0, shape=4)
        eta = pm.math.dot(batch[:, :4], beta)
        pm.Bernoulli("seen", logit_p=eta, observed=batch[:, 4], total_size=loader.total_size)
    assert max(away(fit(model, loader), full_fit(logistic, data))) < 0.01


def test_a_function_that_begins_a_pass():
    data = data_of(logistic)
    parts = split(data)
    approx = fit(logistic(parts[0]), lambda: (part for part in parts))
    assert approx.record.stream.n_passes > 1
    assert max(away(approx, full_fit(logistic, data))) < 0.01


# --- data that can be read once ---


@pytest.mark.parametrize("make", [logistic, poisson, normal])
def test_what_is_read_once_says_how_far_it_is_off(make):
    data = data_of(make)
    parts, full = split(data, 20), full_fit(make, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)
        approx = fit(make(parts[0]), iter(parts))
    stream, off = approx.record.stream, away(approx, full)[0]
    assert stream.was_read_once
    assert (stream.n_passes, stream.n_batches, stream.n_rows) == (1, 20, N_ROWS)
    assert off < 0.1
    assert off / 3.0 < stream.moved < 30.0 * off + 0.01
    assert abs(approx.elbo.value - full.elbo.value) < 3.0 * approx.elbo.se + 0.01
    summary = str(approx.summary())
    assert "An approximation, not judged: its data could be read only once" in summary
    assert "2,700 observations" in summary
    with pytest.raises(pymc_ngvi.BatchError, match="no other pass through the data"):
        approx.refine(tol=1e-9, progressbar=False)


def test_cures_are_options_that_batches_take():
    """Other posteriors take draws of log p on all data."""
    data = data_of(groups)
    cure = context_of(fit(groups(data), split(data))._posterior).shape_cure()
    assert not any(word in cure for word in ("posterior=", "reparam="))


def test_an_order_of_what_is_read_once_is_warned_of():
    data = data_of(logistic)
    order = np.argsort(data["y"], kind="stable")
    parts = split({name: array[order] for name, array in data.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        approx = fit(logistic(parts[0]), iter(parts))
    assert any("seem to be ordered" in str(w.message) for w in caught if w.category is UserWarning)
    assert approx.status in (Status.ONE_PASS, Status.CONVERGED)


def test_orders_are_told_from_chance():
    rng, q = np.random.default_rng(5), FullState.from_scale(np.zeros(3), np.full(3, 0.01))
    level = np.linspace(-5.0, 5.0, 30)[:, None] * [1.0, 0.0, 0.0]

    def sites(mean, scale=1.0):
        grads = mean + scale * 100.0 / np.sqrt(30.0) * rng.standard_normal((30, 3))
        return [Quadratic(100, 0.0, grad, np.zeros((3, 3))) for grad in grads]

    found = [sign_of_order(q, sites(np.zeros(3))) for _ in range(200)]
    assert sum(map(bool, found)) == 0
    assert "alike" in sign_of_order(q, sites(100.0 / np.sqrt(30.0) * level))
    assert "differ" in sign_of_order(q, sites(np.zeros(3), scale=3.0))


def test_a_source_goes_on_where_it_was_cut_short():
    source = BatchSource(iter("abc"))
    assert source.look() == "a"
    assert source.read(0, Place())[1] == "a"
    assert [source.read(0, Place(0, 1))[1] for _ in range(2)] == ["b", "b"]
    again = BatchSource(Again("abc"))
    assert [again.read(0, Place(p, k))[1] for p, k in [(0, 0), (0, 1), (1, 2), (1, 0)]] == ["a", "b", "c", "a"]


# --- parts ---


# --- what goes wrong on the way ---


@pytest.mark.parametrize("n_read", [N_BATCHES + 4, 5])
def test_a_source_that_fails_is_gone_on_with(n_read):
    data = data_of(logistic)
    items = Items(split(data), [n_read])
    with pytest.raises(pymc_ngvi.BatchError, match="can't be read: OSError: the disk is gone") as caught:
        fit(logistic(items.batches[0]), items)
    approx = caught.value.approx
    assert approx.n_iterations == n_read - 1  # one was a look
    approx.refine(progressbar=False)
    same = fit(logistic(items.batches[0]), items.batches)
    assert approx.converged
    assert np.array_equal(approx.mean_flat, same.mean_flat)


def test_a_source_in_its_own_order_that_fails_is_gone_on_with():
    data, failures = data_of(logistic), [4]

    class Failing(Again):
        def __iter__(self):
            for number, batch in enumerate(self.batches):
                if failures and number == failures[0]:
                    failures.pop()
                    raise OSError("the disk is gone")
                yield batch

    parts = split(data)
    with pytest.raises(pymc_ngvi.BatchError, match="Batch 5 of pass 1 can't be read") as caught:
        fit(logistic(parts[0]), Failing(parts))
    approx = caught.value.approx.refine(progressbar=False)
    assert np.array_equal(approx.mean_flat, fit(logistic(parts[0]), Again(parts)).mean_flat)


def test_iterations_may_be_few_at_a_time():
    parts = split(data_of(logistic))
    with pytest.warns(pymc_ngvi.ConvergenceWarning, match="0 passes and 4 batches through 4 batches of 1,200 rows"):
        approx = fit(logistic(parts[0]), parts, n=4)
    assert approx.status is Status.MAX_ITERATIONS
    assert approx.record.stream.n_more == 4
    with pytest.warns(pymc_ngvi.ConvergenceWarning):
        approx.refine(9, progressbar=False)
    approx.refine(progressbar=False)
    assert np.array_equal(approx.mean_flat, fit(logistic(parts[0]), parts).mean_flat)


@pytest.mark.parametrize(("total_size", "has"), [(N_ROWS + 1, "has 2,700 rows"), (N_ROWS - 1, "more than 2,699 rows")])
@pytest.mark.parametrize("source", [list, Again, iter])
def test_a_pass_of_another_size_is_an_error(total_size, has, source):
    parts = split(data_of(logistic))
    with pytest.raises(pymc_ngvi.BatchError, match=f"{has}, and total_size is {total_size:,}") as caught:
        fit(logistic(parts[0], total_size), source(parts))
    assert caught.value.approx.n_iterations >= N_BATCHES - 1


def test_sites_that_do_not_fit_in_memory(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.methods.sites.fits_in_memory", lambda needed: needed < 9 * 14 * 8)
    parts = split(data_of(logistic))
    with pytest.raises(MemoryError, match="What 9 batches of 300 rows say of 4 coordinates"):
        fit(logistic(parts[0]), parts)


def test_a_fit_from_a_file_has_no_batches(tmp_path):
    parts = split(data_of(logistic))
    model = logistic(parts[0])
    approx = fit(model, parts)
    approx.save(tmp_path / "approx.nc")
    again = pymc_ngvi.load(tmp_path / "approx.nc", model)
    assert again.record.stream == approx.record.stream
    with pytest.raises(ValueError, match="fit again with batches="):
        again.refine(tol=1e-9)
    assert fit(model, parts, start=again).converged


# --- bad input ---


def with_batch(**arrays):
    """Return batches of which the third has other arrays."""
    parts = split(data_of(logistic))
    parts[2] = {name: array for name, array in {**parts[2], **arrays}.items() if array is not None}
    return parts


NAN = np.zeros((300, 4))
NAN[17, 2] = np.nan
BAD = {
    "no dicts": (lambda: [1, 2], "The first batch is a int; it should be a dict of arrays"),
    "unknown": (lambda: with_batch(z=np.zeros(300)), r"'z', which is no pm.Data of the model"),
    "missing": (lambda: with_batch(y=None), r"lacks 'y'; it has 'X'"),
    "missing first": (
        lambda: [{"X": part["X"]} for part in split(data_of(logistic))],
        "first batch lacks 'y'|not in the",
    ),
    "shape": (
        lambda: with_batch(X=np.zeros((300, 3))),
        r"'X' of shape \(300, 3\); the model's pm.Data has \(rows, 4\)",
    ),
    "axes": (lambda: with_batch(y=np.zeros((300, 1))), r"'y' of shape \(300, 1\)"),
    "lengths": (lambda: with_batch(y=np.zeros(299)), r"different numbers of rows: 'X' 300, 'y' 299"),
    "nan": (lambda: with_batch(X=NAN), r"1 NaN in 'X', the first in row 17"),
    "no rows": (lambda: with_batch(X=np.zeros((0, 4)), y=np.zeros(0)), "is empty: it has no rows"),
    "fractions": (lambda: with_batch(y=np.full(300, 0.5)), "'y' with fractions"),
    "words": (lambda: with_batch(y=np.full(300, "a")), "'y' of type"),
    "no items": (list, r"batches is empty: its len\(\) is 0"),
    "nothing": (lambda: iter([]), "batches is empty: it gave nothing. Iterators can be read only once"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches(name):
    batches, message = BAD[name]
    with pytest.raises((pymc_ngvi.BatchError, ValueError), match=message):
        fit(logistic(split(data_of(logistic))[0]), batches())


@pytest.mark.parametrize("batches", [3, "abc", {"X": np.zeros(3)}, np.zeros((3, 2))])
def test_no_batches(batches):
    with pytest.raises(TypeError, match="batches should be an iterable of dicts"):
        fit(logistic(split(data_of(logistic))[0]), batches)


def changed(change):
    model = logistic(split(data_of(logistic))[0])
    with model:
        change(model)
    return model


MODELS = {
    "no total_size": (
        lambda: logistic(split(data_of(logistic))[0], None),
        "'seen' depends on data in batches and has no total_size: give it",
    ),
    "total_size of columns": (
        lambda: changed(lambda m: pm.Normal("u", 0.0, observed=m["X"], total_size=[N_ROWS, 4])),
        "total_size of 'u' should be one number",
    ),
    "two sizes": (lambda: changed(lambda m: pm.Normal("u", observed=m["X"], total_size=9)), "different total_size"),
    "a local variable": (lambda: changed(lambda m: pm.Normal("z", 0.0, 1.0, shape=m["y"].shape)), "Free variables 'z'"),
    "a potential": (lambda: changed(lambda m: pm.Potential("p", m["y"].sum() * m["beta"][0])), "Potentials 'p' depend"),
    "values that stay": (
        lambda: changed(lambda m: pm.Normal("u", m["beta"][0] * m["y"], observed=np.zeros(300), total_size=N_ROWS)),
        "observed values of 'u' are not in the batches",
    ),
    "a minibatch": (
        lambda: changed(lambda m: pm.Normal("u", observed=pm.Minibatch(np.zeros(50), batch_size=9), total_size=50)),
        "pm.Minibatch data, which are all in memory, and batches are given",
    ),
    "no rows of the prior": (
        lambda: changed(
            lambda m: pm.Potential("p", -pm.math.logsumexp(pm.Normal("many", shape=30) ** 2 + m["beta"][0]) ** 2)
        ),
        "The prior is no sum over rows",
    ),
    "no rows of few predictors": (
        lambda: changed(
            lambda m: pm.Normal(
                "u", m["X"][:, 0] * pm.math.logsumexp(m["X"] @ m["beta"]), observed=m["y"] * 1.0, total_size=N_ROWS
            )
        ),
        "can't be used: its log likelihood is no sum over rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_that_take_no_batches(name):
    make, message = MODELS[name]
    with pytest.raises((pymc_ngvi.BatchError, ValueError), match=message):
        fit(make(), split(data_of(logistic)))


def test_a_model_without_data():
    with pm.Model() as model:
        pm.Normal("x")
    with pytest.raises(ValueError, match="the model has none: write, for example"):
        fit(model, split(data_of(logistic)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "price"}, "leave estimator='price' out"),
        ({"step": "decay"}, "leave step='decay' out"),
        ({"update": "sqrt"}, "leave update='sqrt' out"),
        ({"reparam": "rvb2"}, "leave reparam='rvb2' out"),
        ({"posterior": "exact"}, "with batches, leave it out"),
        ({"family": "sparse"}, "batches= goes with family='full' or 'diagonal' or 'block'"),
    ],
)
def test_options_that_do_not_go_with_batches(options, message):
    parts = split(data_of(logistic))
    with pytest.raises(ValueError, match=message):
        fit(logistic(parts[0]), parts, **options)


def test_shards_and_batches():
    shards = pymc_ngvi.Shards(lambda key: logistic(split(data_of(logistic))[key]), range(3))
    with pytest.raises(TypeError, match="Give shards or batches"):
        pm.fit(method="ngvi", shards=shards, batches=[{}], progressbar=False)
