"""Models whose data are in shards: the posterior of all rows, whoever evaluates them, and if workers die."""

import functools
import gc
import multiprocessing
import os
import pickle
import time

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from operator import methodcaller

import cloudpickle
import numpy as np
import pymc as pm
import pytest
import sharded_models as models

import pymc_ngvi

from pymc_ngvi import BrokenExecutorError, ShardError, Shards, StartError, Status
from pymc_ngvi.density import shards as engines
from pymc_ngvi.density import shards as of_cluster
from pymc_ngvi.density import shards as on_dask
from pymc_ngvi.density.shards import Recipe, Shard, ShardedDensity, forget
from pymc_ngvi.marginal.exact import forest_of
from pymc_ngvi.marginal.on_model import FittedDensity, TermsInShards
from pymc_ngvi.posteriors import kinds as trees

KEYS = range(models.N_SHARDS)
# Other processes import nothing from here.
cloudpickle.register_pickle_by_value(models)


def fit(shards=None, *, seed=1, **options):
    options = {"posterior": "gaussian", **options}
    return pm.fit(method="ngvi", shards=shards, random_seed=seed, progressbar=False, **options)


def same_bits(one, other):
    return np.array_equal(one.q.mean(), other.q.mean()) and np.array_equal(one.q.cov(), other.q.cov())


@pytest.fixture(scope="module")
def reference():
    return fit(Shards(models.of_rows(models.logistic), KEYS))


@pytest.mark.parametrize("make", [models.logistic, models.normal, models.grouped])
def test_the_posterior_is_that_of_all_rows(make):
    whole, shards = fit(model=make()), fit(Shards(models.of_rows(make), KEYS))
    sd = whole.q.sd()
    assert shards.record.estimator == "quadrature"
    # each shard chooses rules of quadrature for its own rows
    np.testing.assert_allclose((shards.q.mean() - whole.q.mean()) / sd, 0.0, atol=1e-5)
    np.testing.assert_allclose(shards.q.sd(), whole.q.sd(), rtol=1e-5)
    assert shards.elbo.value == pytest.approx(whole.elbo.value, abs=1e-7)
    assert shards.gap == pytest.approx(whole.gap, abs=1e-6)


@pytest.mark.parametrize("make", [models.normal, models.grouped])
def test_the_exact_posterior_is_that_of_all_rows(make):
    """Groups that have rows in several shards, too: their terms add up."""
    whole, shards = fit(model=make(), posterior="exact"), fit(Shards(models.of_rows(make), KEYS), posterior="exact")
    assert shards.is_exact
    one, other = whole._state, shards._state
    near = 5.0 / np.sqrt(one.checks.effective_size)  # rounding decides which rounds there are
    np.testing.assert_allclose((other.mean() - one.mean()) / one.sd(), 0.0, atol=near)
    np.testing.assert_allclose(other.sd(), one.sd(), rtol=near)
    assert other.log_normaliser[0] == pytest.approx(one.log_normaliser[0], abs=near)


def test_terms_of_groups_add_up_and_are_found_again():
    shards = Shards(models.of_rows(models.grouped), KEYS)
    sharded, whole = ShardedDensity(shards), pymc_ngvi.LogDensity(models.grouped())
    forest = forest_of(sharded)
    assert forest.n_local == 40
    rng = np.random.default_rng(5)
    g, local = 0.5 * rng.standard_normal((3, forest.n_globals)), rng.standard_normal((3, 2, forest.n_local))
    own = TermsInShards(sharded, forest)
    found = own.terms(g, local)
    for one, other in zip(found, FittedDensity(whole, forest, whole.initial_point()).terms(g, local), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    forget(shards._recipe.name)  # as where a worker has died
    for one, other in zip(own.terms(g, local), found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_log_p_and_its_derivatives_are_sums_over_shards():
    rng = np.random.default_rng(3)
    density = fit(Shards(models.of_rows(models.grouped), KEYS), n=0).density
    whole = pymc_ngvi.LogDensity(models.grouped())
    theta = density.initial_point() + 0.3 * rng.standard_normal((3, density.n_dim))
    for one, other in zip(density.logp_grad(theta), whole.logp_grad(theta), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(density.logp(theta), whole.logp(theta), rtol=1e-12)
    directions = rng.standard_normal((2, density.n_dim))
    np.testing.assert_allclose(
        density.mean_hessian(theta).products(directions), whole.mean_hessian(theta).products(directions), atol=1e-8
    )
    np.testing.assert_allclose(density.mean_hessian(theta).diagonal(), whole.mean_hessian(theta).diagonal(), atol=1e-8)


def test_the_order_of_the_keys_is_all_that_counts(reference):
    with ThreadPoolExecutor(3) as threads:
        assert same_bits(fit(Shards(models.of_rows(models.logistic), KEYS, threads)), reference)


@pytest.mark.parametrize(
    ("large", "n_killed"),
    [pytest.param(0, 2, marks=pytest.mark.slow), (10**9, 1)],
    ids=["requests-apart", "requests-in-tasks"],
)
def test_a_worker_that_is_killed_changes_no_bit(large, n_killed, cluster, reference, monkeypatch):
    monkeypatch.setattr(on_dask, "_LARGE", large)
    shards = Shards(models.of_rows(models.logistic), KEYS, cluster)
    killed = []

    def kill(approx, losses, n):
        if n <= n_killed:  # each comes back with all that it has to import
            pids = list(cluster.run(os.getpid).values())
            os.kill(pids[n % len(pids)], 9)
            killed.append(n)

    assert same_bits(fit(shards, callbacks=[kill]), reference)
    assert killed == [1, 2][:n_killed]


def test_a_shard_that_kills_all_workers_ends_the_fit(cluster, monkeypatch):
    monkeypatch.setattr(on_dask, "_MOST_LOST", 1)
    monkeypatch.setattr(cluster.cluster.scheduler, "allowed_failures", 0)

    def build(key):
        if key == 2 and os.getpid() != home:
            os.kill(os.getpid(), 9)
        return models.logistic(models.rows_of(key))

    home = os.getpid()
    with pytest.raises(BrokenExecutorError, match=r"Shard \d was lost [2-9] times: its workers die"):
        fit(Shards(build, KEYS, cluster))


@pytest.fixture
def threads_of_dask(monkeypatch):
    """A worker in this process, which leaves when the cluster is scaled down."""
    from distributed import Client, LocalCluster

    monkeypatch.setattr(of_cluster, "_LOOK", 0.1)
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**options, silence_logs=50) as cluster, Client(cluster, timeout=180) as client:
        yield client


def leaving(client):
    """Return a callback that takes all workers away after the first iteration."""

    def leave(approx, losses, n):
        if n == 1:
            client.cluster.scale(0)
            while client.nthreads():
                time.sleep(0.05)

    return leave


def test_workers_that_never_come_back_end_the_fit_which_goes_on_with_others(threads_of_dask, reference, monkeypatch):
    client = threads_of_dask
    monkeypatch.setattr(of_cluster, "_PATIENCE", 0.5)
    with pytest.raises(BrokenExecutorError, match=r"no worker for \d+ s: those that evaluated .* Start some") as error:
        fit(Shards(models.of_rows(models.logistic), KEYS, client), callbacks=[leaving(client)])
    approx = error.value.approx
    assert approx.n_iterations == 1
    client.cluster.scale(1)
    approx.refine(progressbar=False)
    assert approx.converged
    assert same_bits(approx, reference)


def test_workers_of_an_adaptive_cluster_are_waited_for(threads_of_dask, reference, monkeypatch, caplog):
    client = threads_of_dask
    monkeypatch.setattr(of_cluster, "_PATIENCE", 0.0)

    def leave_and_adapt(approx, losses, n):
        leaving(client)(approx, losses, n)
        if n == 1:
            client.cluster.adapt(minimum=0, maximum=1, interval="500ms")

    approx = fit(Shards(models.of_rows(models.logistic), KEYS, client), callbacks=[leave_and_adapt])
    assert same_bits(approx, reference)
    assert "no worker for 0 s; the shards are waiting for one" in caplog.text


def test_a_broken_pool_keeps_the_fit_which_goes_on_with_another(tmp_path, reference):
    context = multiprocessing.get_context("forkserver")

    def end(approx, losses, n):
        if n == 2:
            for process in multiprocessing.active_children():
                process.kill()

    with (
        ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(BrokenExecutorError, match="Make another") as error,
    ):
        fit(Shards(models.of_rows(models.logistic), KEYS, pool), callbacks=[end])
    approx = error.value.approx
    assert approx.n_iterations == 2
    assert approx.status is not Status.CONVERGED
    assert np.isfinite(approx.elbo.value)
    approx.refine(progressbar=False, executor=ThreadPoolExecutor(2))
    assert approx.converged
    assert same_bits(approx, reference)


# --- shards that are no parts of one model ---


def changed(key, change):
    def build(shard):
        model = models.logistic(models.rows_of(shard))
        return change(model) if shard == key else model

    return build


def with_a_variable(model):
    with model:
        pm.Normal("gamma")
    return model


def other_prior(model):
    X, y, *_ = models.data()
    with pm.Model() as other:
        beta = pm.Normal("beta", 0.0, 2.5, shape=models.N_DIM)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return other


def of_few(n, n_rows=10):
    X, y, *_ = models.data()
    with pm.Model(coords={"k": range(n)}) as other:
        beta = pm.Normal("beta", 0.0, 2.0, dims="k")
        pm.Bernoulli("y", logit_p=X[:n_rows, :n] @ beta, observed=y[:n_rows])
    return other


def raising(model):
    raise OSError("no such file: part-2.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_a_variable, r"Shard 0 has the free variables beta, and shard 2 has beta, gamma"),
        (other_prior, r"priors of shards 0 and 2 differ.*whole data"),
        (lambda model: of_few(3), r"shape of 'beta' differs between the shards 0 \(\(5,\)\) and 2 \(\(3,\)\)"),
        (lambda model: of_few(5), r"dims of 'beta' differ between the shards 0"),
        (lambda model: of_few(5, 0), r"Shard 2 is empty"),
        (raising, r"Shard 2 can't be used: OSError: no such file: part-2.parquet"),
        (lambda model: None, r"Shard 2 can't be used: TypeError: build returned None instead of a pm.Model"),
    ],
)
def test_a_shard_that_is_no_part_of_the_model_is_named(change, message):
    with pytest.raises(ShardError, match=message) as error:
        fit(Shards(changed(2, change), KEYS))
    assert error.value.key == 2


@functools.cache
def one_model():
    return models.logistic(models.rows_of(0))


def the_same_model(key):
    return one_model()


def reading(*, observed=True, batches=False, missing=False, potential=None, coords=None, deterministic=False):
    """Return what builds shards that have a feature."""
    X, _, z, _ = models.data()

    def build(key):
        x, y = X[models.rows_of(key), 1], z[models.rows_of(key)]
        if batches:
            x, y = pm.Minibatch(x, y, batch_size=20)
        elif missing:
            y = np.ma.masked_array(y, mask=np.arange(len(y)) == 7)
        with pm.Model(coords=coords) as model:
            slope = pm.Normal("slope", 0.0, 2.0, **({"dims": "k"} if coords else {"shape": 1}))
            mu = slope[0] * x
            if deterministic:
                pm.Deterministic("mu", mu)
                pm.Deterministic("twice", 2.0 * slope)
            if potential is not None:
                potential(key, slope)
            pm.Normal("y", mu, 1.0, observed=y, **({"total_size": 150} if batches else {}))
        return model

    return build


def same_in_all(key, slope):
    """A likelihood of as many successes in each shard, in another order."""
    pm.Potential("ups", pm.logp(pm.Bernoulli.dist(logit_p=slope[0]), np.roll([1, 1, 0, 0, 0], key)).sum())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (the_same_model, "build returned the same model for the shards 0 and 1"),
        (reading(batches=True), "The model of shard 0 reads pm.Minibatch data"),
        (reading(missing=True), "'y' lacks values in shard 0"),
        (reading(potential=same_in_all), "The potential 'ups' has the same values in all shards, but reads other data"),
        (lambda key: None, "Shard 0 can't be used: TypeError: build returned None"),
    ],
)
@pytest.mark.filterwarnings("ignore::pymc.exceptions.ImputationWarning")
def test_what_would_give_another_posterior_than_that_of_all_rows_is_refused(build, message):
    with pytest.raises(ShardError, match=message):
        fit(Shards(build, KEYS))


def test_coordinates_of_other_types_and_without_a_value_are_the_same():
    coordinates = [
        [0, np.nan],
        np.array([0.0, np.nan]),
        (np.float32(0.0), float("nan")),
        np.array([0, None], dtype=float),
    ]
    model = fit(Shards(lambda key: reading(coords={"k": coordinates[key]})(key), KEYS), n=0).model
    assert len(model.coords["k"]) == 2


def test_a_shard_outside_the_support_at_the_start_is_named():
    def outside(key, slope):
        pm.Potential("limit", pm.math.switch(slope[0] > float(key - 2.5), 0.0, -np.inf) + 0.0 * key * slope[0])

    with pytest.raises(StartError, match=r"limit of shard 3 \(-inf\)"):
        fit(Shards(reading(potential=outside), KEYS))


def test_draws_have_what_is_no_function_of_the_rows_of_a_shard():
    approx = fit(Shards(reading(deterministic=True), KEYS))
    draws = approx.sample(10, random_seed=1)
    assert set(draws.children) == {"posterior", "sample_stats"}
    assert set(draws.posterior.data_vars) == {"slope", "twice"}
    with pytest.raises(ValueError, match="No free variable is called 'mu'"):
        approx.cov_of("mu")
    with pytest.raises(ValueError, match="rows are in shards or batches"):
        approx.sample(10, log_likelihood=True)


def test_predictions_are_of_the_rows_of_each_shard():
    """Not by a Deterministic of another one, which PyMC takes from the draws where they have it."""
    shards = Shards(reading(deterministic=True), KEYS)
    draws = fit(shards).sample(100, random_seed=1)

    def error(key, model):
        x = models.data()[0][models.rows_of(key), 1]
        tree = pm.sample_posterior_predictive(draws, model=model, progressbar=False, random_seed=1)
        mean = tree.posterior_predictive["y"].mean(["chain", "draw"]).to_numpy()
        return float(np.abs(mean - draws.posterior["slope"].mean().item() * x).max())

    # Means of 100 draws with sd 1, the largest of 150 of them.
    assert max(largest for _, largest in shards.map(error)) < 5.0 / np.sqrt(100)


def test_an_error_of_a_shard_crosses_processes_with_its_key():
    error = pickle.loads(pickle.dumps(ShardError("Shard 'a' is empty.", "a")))
    assert (str(error), error.key) == ("Shard 'a' is empty.", "a")


def test_a_shard_that_fails_in_mid_fit_keeps_the_fit(tmp_path):
    broken, two = tmp_path / "broken", KEYS[:2]

    def build(key):
        if broken.exists():
            raise OSError("the disk is full")
        return models.logistic(models.rows_of(key))

    def fail(approx, losses, n):
        if n == 2:
            broken.touch()

    with pytest.raises(ShardError, match="Shard 0 can't be used: OSError: the disk is full") as error:
        fit(Shards(build, two, keep=1), callbacks=[fail])  # made anew in each pass
    approx = error.value.approx
    assert approx.n_iterations == 2
    broken.unlink()
    assert same_bits(approx.refine(progressbar=False), fit(Shards(models.of_rows(models.logistic), two)))


@pytest.mark.parametrize("when", ["the exact posterior", "refine"])
def test_a_shard_that_fails_after_the_fit_keeps_it(when, monkeypatch):
    approx = fit(Shards(models.of_rows(models.normal), KEYS))
    n, shards = approx.n_iterations, approx.density.shards

    def fail(*_, **__):
        raise ShardError("Shard 0 can't be used: OSError: the disk is full", 0)

    if when == "refine":
        monkeypatch.setattr(type(shards), "ask", fail)
        with pytest.raises(ShardError) as error:
            approx.refine(progressbar=False, tol=1e-12)
        assert error.value.approx is approx
    else:
        monkeypatch.setattr(trees, "exact_posterior", fail)
        with pytest.raises(ShardError) as error:
            fit(Shards(models.of_rows(models.normal), KEYS), posterior="exact")
        assert same_bits(error.value.approx, approx)
        assert error.value.approx.converged
    assert error.value.approx.n_iterations >= n


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "keys is empty"),
        (([1, 2, 1],), ValueError, "key 1 occurs 2 times"),
        (([[1], [2]],), TypeError, r"The key \[1\] can't be hashed"),
        (("part-1.parquet",), TypeError, "a key for each shard; got 'part-1.parquet'"),
        ((3,), TypeError, "a key for each shard; got 3"),
        (
            (KEYS, "dask"),
            TypeError,
            "executor should be a concurrent.futures.Executor or a distributed.Client; got 'da",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Shards(models.logistic, *arguments)


def test_what_can_not_be_a_fit_of_shards():
    shards = Shards(models.of_rows(models.logistic), KEYS)
    with pytest.raises(TypeError, match="Give a model or shards"):
        fit(shards, model=models.logistic())
    with pytest.raises(TypeError, match=r"shards should be pymc_ngvi.Shards"):
        fit([1, 2])
    with pytest.raises(TypeError, match="build should be a function"):
        Shards(models.logistic(), KEYS)
    for keep in (0, 1.5):
        with pytest.raises(ValueError, match="keep is a number of shards"):
            Shards(models.logistic, KEYS, keep=keep)
    with pytest.raises(ValueError, match="does not go with shards"):
        fit(shards, estimator="gauss_newton", family="diagonal")
    with pytest.raises(ValueError, match="leave executor out"):
        fit(model=models.logistic()).refine(progressbar=False, executor=ThreadPoolExecutor(1))


def test_two_requests_to_a_shard_wait_for_each_other():
    """Those of a pass that was given up may still be under way."""
    shard = Shard(Recipe(cloudpickle.dumps(models.of_rows(models.logistic)), KEYS, None, "alone", os.getpid()), 0)
    events = []

    def note(key, model):
        events.append("in")
        time.sleep(0.05)
        events.append("out")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(shard.answer, [methodcaller("of_model", note)] * 2))
    assert events == ["in", "out"] * 2


def test_data_of_shards_go_with_these():
    shards = Shards(models.of_rows(models.normal), KEYS)
    # A potential of the prior, which gives the shards another name.
    density = ShardedDensity(shards)
    name = shards._recipe.name
    assert sum(at[0] == name for at in engines._SHARDS) == models.N_SHARDS
    del density, shards
    gc.collect()
    assert not any(at[0].startswith(name.rstrip("-")) for at in engines._SHARDS)


def test_a_saved_fit_goes_on_with_the_shards(tmp_path, reference):
    with pytest.warns(pymc_ngvi.ConvergenceWarning):
        approx = fit(Shards(models.of_rows(models.logistic), KEYS), n=2)
    approx.save(tmp_path / "approx.nc")
    again = pymc_ngvi.load(tmp_path / "approx.nc", Shards(models.of_rows(models.logistic), KEYS))
    assert same_bits(again.refine(progressbar=False), reference)


def test_what_is_read_off_single_rows_is_refused(reference):
    with pytest.raises(ValueError, match="rows are in shards"):
        reference.sites()
    with pytest.raises(ValueError, match="data of groups, which are in shards"):
        fit(Shards(models.of_rows(models.grouped), KEYS), reparam="rvb1")
    with pytest.raises(ValueError, match="no nested posterior: the data are in shards"):
        fit(Shards(models.of_rows(models.grouped), KEYS), posterior="nested")
    assert reference.structure.rows is None


def test_a_summary_counts_the_rows_of_all_shards(reference):
    assert f"{models.N_ROWS:,} observations." in str(reference.summary())


def test_functions_are_applied_where_the_data_are():
    shards = Shards(models.of_rows(models.logistic), KEYS)
    sizes = dict(shards.map(lambda key, model: len(model["y"].eval())))
    assert sizes == dict.fromkeys(KEYS, models.N_ROWS // models.N_SHARDS)
