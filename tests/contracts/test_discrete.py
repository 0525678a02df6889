"""Discrete free variables: summed out of the model, drawn given each draw of the others, or refused with the reason."""

import functools
import itertools
import pickle
import warnings

import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from scipy import stats
from scipy.special import logsumexp

from pymc_ngvi import LogDensity, fit_ngvi, load
from pymc_ngvi.density.discrete import summing
from pymc_ngvi.density.discrete.summing import draw_chains

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    extras = pytest.importorskip("pymc_extras.distributions", reason="pymc_extras sums variables out")

QUIET = {"progressbar": False, "random_seed": 1}
#: Draws, and how far a proportion of so many may be from its probability: 4.5 standard errors at most.
N_DRAWS = 4_000
WITHIN = 4.5 * 0.5 / np.sqrt(N_DRAWS)
rng = np.random.default_rng(5)
Y = np.concatenate([rng.normal(-1.5, 1.0, 12), rng.normal(1.5, 0.7, 12)])
COUNTS = np.array([0, 0, 0, 3, 2, 4, 0, 1, 0, 0, 5, 0])
CHANGE = np.concatenate([rng.poisson(6.0, 5), rng.poisson(2.0, 5)])


def mixture(y=Y):
    with pm.Model(coords={"row": np.arange(len(y)), "part": ["low", "high"]}) as model:
        data = pm.Data("data", y, dims="row")
        p = pm.Dirichlet("p", np.ones(2), dims="part")
        ordered = pm.distributions.transforms.ordered
        mu = pm.Normal("mu", 0.0, 3.0, dims="part", transform=ordered, initval=np.array([-1.0, 1.0]))
        z = pm.Categorical("z", p=p, dims="row")
        pm.Deterministic("of_row", mu[z], dims="row")
        pm.Normal("y", mu[z], 1.0, observed=data, dims="row")
    return model


def inflated():
    """Return a model whose rate is 0 in one state: derivatives of its logarithm are not finite there."""
    with pm.Model() as model:
        psi = pm.Beta("psi", 2.0, 2.0)
        rate = pm.Gamma("rate", 2.0, 1.0)
        on = pm.Bernoulli("on", psi, shape=len(COUNTS))
        pm.Poisson("y", rate * on, observed=COUNTS)
    return model


def change_point():
    times = np.arange(len(CHANGE))
    with pm.Model() as model:
        when = pm.DiscreteUniform("when", 0, len(CHANGE) - 1)
        early, late = pm.Exponential("early", 1.0), pm.Exponential("late", 1.0)
        pm.Poisson("y", pm.math.switch(times < when, early, late), observed=CHANGE)
    return model


def chain(n=5):
    with pm.Model() as model:
        stay = pm.Beta("stay", 4.0, 2.0)
        rows = pt.stack([pt.stack([stay, 1 - stay]), pt.stack([1 - stay, stay])])
        mu = pm.Normal("mu", 1.0, 2.0)
        start = pm.Categorical.dist([0.3, 0.7])
        z = extras.DiscreteMarkovChain("z", P=rows, init_dist=start, steps=n - 1)
        pm.Normal("y", mu * z, 1.0, observed=Y[9 : 9 + n])
    return model


def chain_with_a_parent(n=4):
    """Return a model of a chain whose transitions depend on another discrete variable."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 1.0, 2.0)
        sticky = pm.Bernoulli("sticky", 0.4)
        stay = pt.switch(sticky, 0.9, 0.4)
        rows = pt.stack([pt.stack([stay, 1 - stay]), pt.stack([1 - stay, stay])])
        start = pm.Categorical.dist([0.3, 0.7])
        z = extras.DiscreteMarkovChain("z", P=rows, init_dist=start, steps=n - 1)
        pm.Normal("y", mu * z, 1.0, observed=Y[9 : 9 + n])
    return model


def in_two_steps():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0)
        first = pm.Bernoulli("first", 0.3, shape=4)
        second = pm.Bernoulli("second", 0.1 + 0.7 * first, shape=4)
        pm.Deterministic("both", first * second)
        pm.Normal("y", mu * second, 1.0, observed=Y[10:14])
    return model


@functools.cache
def summed(build):
    """Return the density of a model for the tests that change nothing of it."""
    return LogDensity(build())


# --- by enumeration ---------------------------------------------------------------------------------------------------
# Of each model: discrete configurations, and log p(y, configuration) given free values, by SciPy.


def by_hand_mixture(free):
    joint = stats.norm.logpdf(Y[:, None], free["mu"], 1.0) + np.log(free["p"])
    return {"z": np.arange(2)}, joint


def by_hand_inflated(free):
    with np.errstate(divide="ignore"):
        joint = np.stack([np.where(COUNTS == 0, 0.0, -np.inf), stats.poisson.logpmf(COUNTS, free["rate"])], axis=1)
    return {"on": np.arange(2)}, joint + np.log([1 - free["psi"], free["psi"]])


def by_hand_change(free):
    times, states = np.arange(len(CHANGE)), np.arange(len(CHANGE))
    rate = np.where(times < states[:, None], free["early"], free["late"])
    joint = stats.poisson.logpmf(CHANGE, rate).sum(axis=1) - np.log(len(CHANGE))
    return {"when": states}, joint[None]


def by_hand_chain(free, n=5):
    paths = np.array(list(itertools.product(range(2), repeat=n)))
    same = (paths[:, 1:] == paths[:, :-1]).sum(axis=1)
    log_prior = np.log(np.array([0.3, 0.7])[paths[:, 0]]) + same * np.log(free["stay"])
    log_prior = log_prior + (n - 1 - same) * np.log(1 - free["stay"])
    joint = log_prior + stats.norm.logpdf(Y[9 : 9 + n], free["mu"] * paths, 1.0).sum(axis=1)
    return {"z": paths}, joint[None]


def by_hand_parent(free):
    parts = [by_hand_chain({**free, "stay": stay}, n=4) for stay in (0.4, 0.9)]
    joint = np.concatenate([parts[0][1] + np.log(0.6), parts[1][1] + np.log(0.4)], axis=1)
    paths = np.tile(parts[0][0]["z"], (2, 1))
    return {"sticky": np.repeat([0, 1], len(paths) // 2), "z": paths}, joint


def by_hand_steps(free):
    first, second = np.array(list(itertools.product(range(2), repeat=2))).T
    log_prior = stats.bernoulli.logpmf(first, 0.3) + stats.bernoulli.logpmf(second, 0.1 + 0.7 * first)
    joint = log_prior + stats.norm.logpdf(Y[10:14, None], free["mu"] * second, 1.0)
    return {"first": first, "second": second}, joint


CASES = [
    pytest.param(mixture, by_hand_mixture, {"p": np.array([0.6, 0.4]), "mu": np.array([-1.2, 1.1])}, id="mixture"),
    pytest.param(inflated, by_hand_inflated, {"psi": 0.55, "rate": 2.3}, id="inflated"),
    pytest.param(change_point, by_hand_change, {"early": 5.0, "late": 3.0}, id="change"),
    pytest.param(chain, by_hand_chain, {"stay": 0.7, "mu": 1.3}, id="chain"),
    pytest.param(chain_with_a_parent, by_hand_parent, {"mu": 1.3}, id="parent"),
    pytest.param(in_two_steps, by_hand_steps, {"mu": 1.4}, id="steps"),
]


@pytest.mark.parametrize(("build", "by_hand", "free"), CASES)
def test_log_p_is_that_of_the_sum(build, by_hand, free):
    """And its gradient is that of finite differences: finite where the rate is 0 in one state."""
    density = summed(build)
    model = density.model
    assert not {rv.name for rv in model.free_RVs} - set(free)

    def expected(point):
        return logsumexp(by_hand(point)[1], axis=1).sum()

    def value(point):
        unconstrained = {}
        for rv in model.free_RVs:
            transform = model.rvs_to_transforms[rv]
            x = pt.as_tensor(np.asarray(point[rv.name], dtype=np.float64))
            made = x if transform is None else transform.forward(x, *rv.owner.inputs)
            unconstrained[model.rvs_to_values[rv].name] = made.eval()
        return density.layout.flatten(unconstrained)

    theta = value(free)
    y = [rv.name for rv in model.observed_RVs]
    np.testing.assert_allclose(sum(density.terms(theta)[name] for name in y), expected(free), atol=2e-4)  # 4 digits
    logp, grad = density.logp_grad(theta[None])
    assert np.isfinite(logp).all()
    steps = 1e-5 * np.eye(density.n_dim)
    slopes = (density.logp(theta + steps) - density.logp(theta - steps)) / 2e-5
    np.testing.assert_allclose(grad[0], slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("build", "by_hand", "free"), CASES)
def test_draws_have_the_exact_probabilities(build, by_hand, free):
    density = summed(build)
    # The loop over a chain whose transitions depend on another variable is run for each draw.
    n_draws = N_DRAWS // 4 if build is chain_with_a_parent else N_DRAWS
    within = WITHIN * np.sqrt(N_DRAWS / n_draws)
    values = {name: np.repeat(np.asarray(value, dtype=float)[None], n_draws, axis=0) for name, value in free.items()}
    drawn = density.discrete_given(values, 3)
    states, joint = by_hand(free)
    probabilities = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    for name, of_states in states.items():
        for state in np.unique(of_states):
            if of_states.ndim > 1:  # paths
                exact = (probabilities[0, :, None] * (of_states == state)).sum(axis=0)
            else:
                exact = np.squeeze(probabilities[:, of_states == state].sum(axis=1))
            np.testing.assert_allclose((drawn[name] == state).mean(axis=0), exact, atol=within, err_msg=name)
    if build is in_two_steps:  # together, too
        both = (probabilities * (states["first"] * states["second"])).sum(axis=1)
        np.testing.assert_allclose(drawn["both"].mean(axis=0), both, atol=within)
        np.testing.assert_array_equal(drawn["both"], drawn["first"] * drawn["second"])
    if build is chain:  # neighbours, too
        same = (probabilities[0] * (states["z"][:, 1:] == states["z"][:, :-1]).T).sum(axis=1)
        np.testing.assert_allclose((drawn["z"][:, 1:] == drawn["z"][:, :-1]).mean(axis=0), same, atol=within)
    few = {name: value[:100] for name, value in values.items()}
    drawn, again = (density.discrete_given(few, 3) for _ in range(2))
    assert all(np.array_equal(drawn[name], again[name]) for name in drawn)
    other = density.discrete_given(few, 4)
    assert not all(np.array_equal(drawn[name], other[name]) for name in states)


def test_axes_in_another_order_and_more_of_them():
    """Two observed variables: one with its axes exchanged and one more, and a multivariate one."""
    generator = np.random.default_rng(0)
    a, b, times = generator.normal(size=(2, 4, 5)), generator.normal(size=(4, 2, 2)), np.arange(5)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0, shape=3)
        p = pm.Dirichlet("p", np.ones(3), shape=(4, 3))
        z = pm.Categorical("z", p=p[:, None, :], shape=(4, 2))
        pm.Normal("a", mu[z].T[..., None] * times, 1.0, observed=a)
        pm.MvNormal("b", mu[z][..., None] * np.ones(2), np.eye(2), observed=b)
    density = LogDensity(model)
    mu, p = np.array([-0.3, 0.1, 0.4]), generator.dirichlet(np.ones(3), size=4)
    joint = np.log(p)[:, None] + np.stack(
        [stats.norm.logpdf(a, m * times, 1.0).sum(axis=2).T + stats.norm.logpdf(b, m, 1.0).sum(axis=2) for m in mu],
        axis=-1,
    )
    simplex = density.model.rvs_to_transforms[density.model["p"]]
    theta = np.concatenate([mu, simplex.forward(pt.as_tensor(p)).eval().ravel()])
    terms = density.terms(theta)
    np.testing.assert_allclose(terms["a"] + terms["b"], logsumexp(joint, axis=-1).sum(), atol=2e-4)  # 4 digits
    values = {"mu": np.repeat(mu[None], N_DRAWS, axis=0), "p": np.repeat(p[None], N_DRAWS, axis=0)}
    drawn, exact = density.discrete_given(values, 1)["z"], np.exp(joint - logsumexp(joint, axis=-1, keepdims=True))
    for state in range(3):
        np.testing.assert_allclose((drawn == state).mean(axis=0), exact[..., state], atol=WITHIN)


def test_chains_whose_transitions_change():
    """Forwards and backwards, where each step has transitions of its own: against all paths."""
    n, k = 4, 3
    generator = np.random.default_rng(2)
    emissions = generator.normal(size=(k, n))
    first = np.log(generator.dirichlet(np.ones(k)))
    transitions = np.log(generator.dirichlet(np.ones(k), size=(n - 1, k)))
    many = [np.repeat(a[None], N_DRAWS, axis=0) for a in (emissions, first, transitions)]
    drawn = draw_chains(*many, np.random.default_rng(1))
    paths = np.array(list(itertools.product(range(k), repeat=n)))
    steps = sum(transitions[t, paths[:, t], paths[:, t + 1]] for t in range(n - 1))
    joint = first[paths[:, 0]] + steps + sum(emissions[paths[:, t], t] for t in range(n))
    p = np.exp(joint - logsumexp(joint))
    for state in range(k):
        exact = (p[:, None] * (paths == state)).sum(axis=0)
        np.testing.assert_allclose((drawn == state).mean(axis=0), exact, atol=WITHIN)


# --- fits -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    model = mixture()
    return model, fit_ngvi(model=model, **QUIET)


def test_a_fit_says_what_was_summed_out(fitted):
    _, approx = fitted
    assert approx.record.summed_out == ("z",)
    assert "`z` was summed out of the model" in str(approx.summary())


def test_the_users_model_stays_as_it_is(fitted):
    model, approx = fitted
    assert [rv.name for rv in model.free_RVs] == ["p", "mu", "z"]
    assert [d.name for d in model.deterministics] == ["of_row"]
    assert [rv.name for rv in approx.model.free_RVs] == ["p", "mu"]
    assert approx.density.given is model
    assert model.rvs_to_initial_values[model["mu"]] is not None


def test_sample_has_discrete_variables_and_what_depends_on_them(fitted):
    _, approx = fitted
    draws = approx.sample(300, chains=2, random_seed=2).posterior
    assert set(draws.data_vars) == {"p", "mu", "z", "of_row"}
    assert draws.z.dims == draws.of_row.dims == ("chain", "draw", "row")
    assert draws.z.dtype.kind == "i"
    picked = np.take_along_axis(draws.mu.values, draws.z.values, axis=-1)
    np.testing.assert_array_equal(draws.of_row.values, picked)
    same = approx.sample(300, chains=2, random_seed=2).posterior
    np.testing.assert_array_equal(draws.z, same.z)
    trace = approx.sample(48, random_seed=2, return_inferencedata=False)
    assert trace["z"].shape == (48, len(Y))


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("z", ["z"]),
        (["of_row", "mu"], ["mu", "of_row"]),
        (["p"], ["p"]),
        (["z", "mu_ordered__"], ["mu_ordered__", "z"]),
    ],
)
def test_names_of_draws(fitted, asked, got):
    assert list(fitted[1].sample(20, var_names=asked).posterior.data_vars) == got


def test_a_summary_shows_discrete_variables_but_not_one_for_each_observation(fitted):
    text = str(fitted[1].summary())
    assert "z[" not in text
    assert "values for each observation (z, of_row)" in text
    assert "z[3]" in str(fitted[1].summary(var_names=["z"]).table.index)


def test_predictions_in_the_users_model(fitted):
    model, approx = fitted
    draws = approx.sample(500, random_seed=1)
    with model:
        predicted = pm.sample_posterior_predictive(draws, random_seed=1, progressbar=False)
    y, mean = predicted.posterior_predictive.y, draws.posterior.of_row
    # Given z, each is normal about the mean of its part with standard deviation 1.
    assert abs(float((y - mean).std()) - 1.0) < 4.5 / np.sqrt(2 * 500 * len(Y))


def test_predictions_of_the_same_rows_and_of_new_ones():
    x = np.linspace(-1.0, 1.0, len(COUNTS))
    with pm.Model() as model:
        data = pm.Data("x", x)
        psi = pm.Beta("psi", 2.0, 2.0)
        slope = pm.Normal("slope", 0.0, 0.3)
        on = pm.Bernoulli("on", psi, shape=data.shape[0])
        pm.Poisson("y", on * pt.exp(1.0 + slope * data), observed=COUNTS, shape=data.shape[0])
    approx = fit_ngvi(model=model, **QUIET)
    same = approx.predict(var_names=["on", "y"], draws=N_DRAWS).predictions
    assert (same.on.values[..., COUNTS > 0] == 1).all()
    assert (same.y.values[same.on.values == 0] == 0).all()
    exact = approx.sample(N_DRAWS).posterior.on.mean(("chain", "draw"))
    np.testing.assert_allclose(same.on.mean(("chain", "draw")), exact, atol=2 * WITHIN)
    new = approx.predict({"x": np.zeros(3)}, var_names=["on"], draws=N_DRAWS).predictions
    psi = float(approx.sample(N_DRAWS).posterior.psi.mean())
    np.testing.assert_allclose(new.on.mean(("chain", "draw")), psi, atol=2 * WITHIN)
    assert set(approx.predict().predictions.data_vars) == {"y"}


def test_data_are_those_of_the_users_model(fitted):
    model, approx = fitted
    before = approx.model["data"].get_value()
    try:
        with model:
            pm.set_data({"data": -Y})
        np.testing.assert_array_equal(approx.model["data"].get_value(), -Y)
        with pytest.warns(UserWarning, match="'data' were changed after the fit"):
            approx.sample(10)
    finally:
        with model:
            pm.set_data({"data": before})


def test_going_on_and_files(fitted, tmp_path):
    model, approx = fitted
    approx.save(tmp_path / "fit.nc")
    loaded = load(tmp_path / "fit.nc", mixture())
    assert loaded.record.summed_out == ("z",)
    for again in (loaded, pickle.loads(cloudpickle.dumps(approx))):
        one, two = (a.sample(50, random_seed=4).posterior for a in (approx, again))
        np.testing.assert_array_equal(one.z, two.z)
    finer = fit_ngvi(model=model, **QUIET).refine(tol=0.01)
    assert "`z` was summed out of the model; approx.sample() draws it." in finer.summary(50).notes
    assert finer.converged
    assert "z" in finer.sample(10).posterior


def test_initial_values_are_kept():
    np.testing.assert_allclose(summed(mixture).model.initial_point()["mu_ordered__"], [-1.0, np.log(2.0)])


def test_missing_counts_are_left_out_and_drawn():
    """Nothing depends on them: no pymc_extras is needed."""
    observed = np.ma.masked_invalid([3.0, np.nan, 2.0, 5.0, np.nan, 1.0])
    with warnings.catch_warnings(), pm.Model() as model:
        warnings.simplefilter("ignore")  # PyMC says that it imputes
        rate = pm.Gamma("rate", 2.0, 1.0)
        pm.Poisson("y", rate, observed=observed)
    approx = fit_ngvi(model=model, **QUIET)
    assert approx.record.summed_out == ("y_unobserved",)
    draws = approx.sample(N_DRAWS).posterior
    # Gamma(2 + 11, 1 + 4) for the rate, its mixture of Poissons for missing counts.
    np.testing.assert_allclose(draws.rate.mean(), 13 / 5, atol=4.5 * np.sqrt(13 / 25 / 1_000))
    np.testing.assert_allclose(
        draws.y_unobserved.mean(("chain", "draw")), 13 / 5, atol=4.5 * np.sqrt((13 / 5 + 13 / 25) / 1_000)
    )
    np.testing.assert_array_equal(draws.y[..., [1, 4]], draws.y_unobserved)
    assert (draws.y[..., 0] == 3).all()


def test_free_variables_may_depend_on_discrete_ones():
    with pm.Model() as model:
        slab = pm.Bernoulli("slab", 0.4, shape=3)
        effect = pm.Normal("effect", 0.0, pt.switch(pt.eq(slab, 1), 3.0, 0.1), shape=3)
        pm.Normal("y", effect, 0.3, observed=[0.02, 0.4, 2.0])
    approx = fit_ngvi(model=model, **QUIET)
    draws = approx.sample(N_DRAWS).posterior
    y = np.array([0.02, 0.4, 2.0])
    of_slab = 0.4 * stats.norm.pdf(y, 0.0, np.hypot(3.0, 0.3))
    exact = of_slab / (of_slab + 0.6 * stats.norm.pdf(y, 0.0, np.hypot(0.1, 0.3)))
    np.testing.assert_allclose(draws.slab.mean(("chain", "draw")), exact, atol=0.03 + WITHIN)


def test_two_observed_variables_of_the_same_data():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0)
        z = pm.Bernoulli("z", 0.4, shape=len(Y))
        pm.Normal("one", mu * z, 1.0, observed=Y)
        pm.Normal("two", mu * z, 2.0, observed=Y)
    density = LogDensity(model)
    theta = np.array([0.7])
    joint = [
        np.log(prior) + stats.norm.logpdf(Y, 0.7 * z, 1.0) + stats.norm.logpdf(Y, 0.7 * z, 2.0)
        for z, prior in ((0, 0.6), (1, 0.4))
    ]
    expected = logsumexp(joint, axis=0).sum() + stats.norm.logpdf(0.7, 0.0, 3.0)
    np.testing.assert_allclose(density.logp(theta[None])[0], expected, rtol=1e-10)


# --- what is refused --------------------------------------------------------------------------------------------------


def poisson():
    k, z = pm.Poisson("k", 3.0), pm.Bernoulli("z", 0.5)
    pm.Normal("y", pm.Normal("x") + k + z, 1.0, observed=Y)


def potential():
    z, x = pm.Bernoulli("z", 0.5), pm.Normal("x")
    pm.Potential("penalty", -(x**2) * z)


def mixed():
    g = pm.Bernoulli("g", 0.5, shape=3)
    pm.Normal("y", np.ones((len(Y), 3)) @ (pm.Normal("b", shape=3) * g), 1.0, observed=Y)


def bounded():
    z = pm.Bernoulli("z", 0.5)
    pm.Normal("y", pm.Uniform("x", 0.0, 1.0 + z), 1.0, observed=Y)


def in_batches():
    a, b = pm.Minibatch(Y, Y, batch_size=10)
    z = pm.Bernoulli("z", 0.5)
    pm.Normal("y", pm.Normal("x") * z * a, 1.0, observed=b, total_size=len(Y))


def many_states():
    pm.Normal("y", pm.Normal("x") * pm.DiscreteUniform("k", 0, 10**6), 1.0, observed=Y)


def alone():
    pm.Normal("y", pm.Bernoulli("z", 0.5), 1.0, observed=Y)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (poisson, r"'k' are discrete, and can't.*'k': it is Poisson, and only Bernoulli"),
        (potential, "'z': the Potential 'penalty' depends on it"),
        (mixed, r"'g': each observation may depend on one element of it only \(.*Matmul"),
        (bounded, "'z': 'x', which depends on it, has bounds"),
        (in_batches, "'z': 'y', which depends on it, has a total_size"),
        (many_states, "'k': there are 1,000,001 states to sum over"),
        (alone, r"All free variables of the model \('z'\) are discrete"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refusals_say_which_and_why(build, reason, capfd):
    with pm.Model() as model:
        build()
    with pytest.raises(ValueError, match=f"(?s){reason}.*pm.sample") as error:
        fit_ngvi(model=model, **QUIET)
    if build is poisson:
        assert "'z'" not in str(error.value)  # that could be summed out
    assert "Rewrite failure" not in capfd.readouterr().err


def test_without_pymc_extras(monkeypatch):
    monkeypatch.setattr(summing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'z': pymc_extras.*is not installed: pip install 'pymc-ngvi\[discrete\]'"):
        fit_ngvi(model=mixture(), **QUIET)
