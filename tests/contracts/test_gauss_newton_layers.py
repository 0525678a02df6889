"""Squares of gradients of single rows in one backward pass, against derivatives of each row by complex steps."""

import logging
import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from matrix import as_curvature, random_state, whitener
from scipy import special

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.density import gauss_newton as matrix
from pymc_ngvi.fitting.options import Choice, options_for
from pymc_ngvi.methods import decay

_RNG = np.random.default_rng(7)
N, D, H, K = 12, 3, 5, 4
X = _RNG.normal(size=(N, D))
BINARY, LABELS = _RNG.integers(0, 2, size=N).astype(float), _RNG.integers(0, K, size=N)
COUNTS, REAL, MANY = _RNG.poisson(2.0, size=N).astype(float), _RNG.normal(size=N), _RNG.normal(size=(N, K))
GROUP = _RNG.integers(0, 4, size=N)


def gradients(rows, theta):
    """Return the derivatives of the log densities of rows, (n_rows, n_dim), exact to rounding."""
    step = 1e-30
    points = theta + 1j * step * np.eye(len(theta))
    return np.stack([np.ravel(rows(point)).imag / step for point in points], axis=1)


def split(theta, *shapes):
    """Return parts of a flat vector, with these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(theta, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def check(model, rows, way, prior=1.0, scale=1.0):
    """Compare squares at three points; priors are N(0, 1) but where ``prior`` says otherwise."""
    density = LogDensity(model, "quick")
    theta = 0.7 * np.random.default_rng(3).normal(size=(3, density.n_dim))
    density.by_observation.rest.n_in_call = 5  # not a divisor of the rows
    assert density.by_observation.squares().way == way
    compare(density, theta, rows, prior, scale)
    return density


def check_matrix(model, rows, way, scale=1.0):
    """Compare all of the matrix, and what it is for families with correlations; priors are N(0, 1)."""
    density = LogDensity(model, "quick")
    n_dim, rng = density.n_dim, np.random.default_rng(3)
    theta = 0.7 * rng.normal(size=(3, n_dim))
    density.by_observation.rest.n_in_call = 5
    each = [gradients(rows, point) for point in theta]
    expected = np.eye(n_dim) + scale * np.mean([g.T @ g for g in each], axis=0)
    hessian = density.gauss_newton(theta)
    for family in ("full", "block"):
        state = random_state(family, n_dim, rng)
        c = whitener(state)
        curvature = as_curvature(state, c.T @ expected @ c)
        np.testing.assert_allclose(hessian.whitened(state), curvature, rtol=1e-9, atol=1e-9 * np.abs(curvature).max())
    assert density.functions.made["row gradients"].way == way


def compare(density, theta, rows, prior=1.0, scale=1.0):
    expected = np.mean([scale * (gradients(rows, point) ** 2).sum(axis=0) for point in theta], axis=0)
    if callable(prior):
        prior = np.mean([prior(point) for point in theta], axis=0)
    np.testing.assert_allclose(-density.gauss_newton(theta).diagonal(), expected + prior, rtol=1e-9, atol=1e-12)


def normal(name, *shape):
    return pm.Normal(name, 0, 1, shape=shape)


def relu(x):
    return np.where(x.real > 0, x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bernoulli(logits, y):
    return -np.log1p(np.exp(np.where(y == 1, -logits, logits)))


def log_softmax(x):
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


# --- networks ---------------------------------------------------------------------------------------------------------


def one_layer(x=X, y=BINARY, total_size=None, n_units=H):
    with pm.Model() as model:
        w1, b1, w2, b2 = normal("w1", D, n_units), normal("b1", n_units), normal("w2", n_units), normal("b2")
        hidden = pm.math.maximum(pm.math.dot(x, w1) + b1, 0)
        pm.Bernoulli("y", logit_p=pm.math.dot(hidden, w2) + b2, observed=y, total_size=total_size)
    return model


def one_layer_rows(theta, at=slice(None), n_units=H):
    w1, b1, w2, b2 = split(theta, (D, n_units), n_units, n_units, ())
    return bernoulli(relu(X[at] @ w1 + b1) @ w2 + b2, BINARY[at])


def two_layers():
    """A scale of its own: HalfNormal on the log scale."""
    with pm.Model() as model:
        w1, b1, w2, b2, w3 = normal("w1", D, H), normal("b1", H), normal("w2", H, K), normal("b2", K), normal("w3", K)
        sigma = pm.HalfNormal("sigma", 1)
        hidden = pm.math.sigmoid(pm.math.tanh(X @ w1 + b1) @ w2 + b2)
        pm.Normal("y", hidden @ w3, sigma, observed=REAL)
    return model


def two_layers_rows(theta):
    w1, b1, w2, b2, w3, log_sigma = split(theta, (D, H), H, (H, K), K, K, ())
    mean = sigmoid(np.tanh(X @ w1 + b1) @ w2 + b2) @ w3
    return -0.5 * ((REAL - mean) * np.exp(-log_sigma)) ** 2 - log_sigma


def categorical(softmax):
    with pm.Model() as model:
        w1, b1, w2, b2 = normal("w1", D, H), normal("b1", H), normal("w2", H, K), normal("b2", K)
        logits = pm.math.tanh(X @ w1 + b1) @ w2 + b2
        given = {"p": pm.math.softmax(logits, axis=1)} if softmax else {"logit_p": logits}
        pm.Categorical("y", **given, observed=LABELS)
    return model


def categorical_rows(theta):
    w1, b1, w2, b2 = split(theta, (D, H), H, (H, K), K)
    return log_softmax(np.tanh(X @ w1 + b1) @ w2 + b2)[np.arange(N), LABELS]


def poisson():
    with pm.Model() as model:
        w1, b1, w2 = normal("w1", D, H), normal("b1", H), normal("w2", H)
        pm.Poisson("y", mu=pt.exp(pm.math.tanh(X @ w1 + b1) @ w2), observed=COUNTS)
    return model


def poisson_rows(theta):
    w1, b1, w2 = split(theta, (D, H), H, H)
    eta = np.tanh(X @ w1 + b1) @ w2
    return COUNTS * eta - np.exp(eta)


def several_outputs():
    """Each element of the data counts as a row: their gradients are squared one by one, not those of their sums."""
    with pm.Model() as model:
        w1, b1, w2, b2 = normal("w1", D, H), normal("b1", H), normal("w2", H, K), normal("b2", K)
        pm.Normal("y", pm.math.tanh(X @ w1 + b1) @ w2 + b2, 0.5, observed=MANY)
    return model


def several_outputs_rows(theta):
    w1, b1, w2, b2 = split(theta, (D, H), H, (H, K), K)
    return -2.0 * (MANY - np.tanh(X @ w1 + b1) @ w2 - b2) ** 2


def with_sigma(theta):
    return np.append(np.ones(len(theta) - 1), 2 * np.exp(2 * theta[-1]))


NETWORKS = {
    "bernoulli, relu": (one_layer, one_layer_rows, 1.0),
    "normal, two layers": (two_layers, two_layers_rows, with_sigma),
    "categorical, logits": (lambda: categorical(False), categorical_rows, 1.0),
    "categorical, softmax": (lambda: categorical(True), categorical_rows, 1.0),
    "poisson": (poisson, poisson_rows, 1.0),
    "normal, several outputs": (several_outputs, several_outputs_rows, 1.0),
}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "categorical, softmax"])
def test_networks(name):
    make, rows, prior = NETWORKS[name]
    check(make(), rows, "layers", prior)


def gelu(z):
    return 0.5 * z * (1 + pt.erf(z / np.sqrt(2)))


def gelu_by_hand(z):
    return 0.5 * z * (1 + special.erf(z / np.sqrt(2)))


def normalised(z, sqrt):
    z = z - z.mean(axis=1, keepdims=True)
    return z / sqrt((z**2).mean(axis=1, keepdims=True) + 0.1)


#: Hidden layers in other words: with PyTensor, of the weights (6, H); and with NumPy.
HIDDEN = {
    "tensordot": (lambda w: pt.tanh(pt.tensordot(X, w[:D], axes=1)), lambda w: np.tanh(X @ w[:D])),
    "einsum": (lambda w: pt.tanh(pt.einsum("nf,fu->nu", X, w[:D])), lambda w: np.tanh(X @ w[:D])),
    "weights on the left": (lambda w: pt.tanh((w[:D].T @ X.T).T), lambda w: np.tanh(X @ w[:D])),
    "softplus": (lambda w: pt.softplus(X @ w[:D]), lambda w: np.log1p(np.exp(X @ w[:D]))),
    "gelu": (lambda w: gelu(X @ w[:D]), lambda w: gelu_by_hand(X @ w[:D])),
    "layer normalisation": (lambda w: normalised(X @ w[:D], pt.sqrt), lambda w: normalised(X @ w[:D], np.sqrt)),
    "residual": (
        lambda w: X @ w[:D] + pt.tanh(X @ w[D:]),
        lambda w: X @ w[:D] + np.tanh(X @ w[D:]),
    ),
    "gates": (
        lambda w: pt.tanh(X @ pt.concatenate([w[:D], w[D:]], axis=1))[:, :H] * pm.math.sigmoid(X @ w[D:]),
        lambda w: np.tanh(X @ w[:D]) * sigmoid(X @ w[D:]),
    ),
    "join": (
        lambda w: pt.concatenate([pt.tanh(X @ w[:D, :2]), X @ w[D:, 2:]], axis=1),
        lambda w: np.concatenate([np.tanh(X @ w[:D, :2]), X @ w[D:, 2:]], axis=1),
    ),
    "embedding": (lambda w: pt.tanh(w[GROUP]), lambda w: np.tanh(w[GROUP])),
}


@pytest.mark.parametrize("names", [tuple(HIDDEN)[:5], tuple(HIDDEN)[5:]], ids=" and ".join)
def test_layers_in_other_words(names):
    """Each with weights of its own, side by side in one network."""
    with pm.Model() as model:
        logits = sum(HIDDEN[name][0](normal(f"w {name}", 2 * D, H)) @ normal(f"v {name}", H) for name in names)
        pm.Bernoulli("y", logit_p=logits, observed=BINARY)

    def rows(theta):
        parts = iter(split(theta, *((2 * D, H), (H,)) * len(names)))
        return bernoulli(sum(HIDDEN[name][1](next(parts)) @ next(parts) for name in names), BINARY)

    check(model, rows, "layers")


def test_the_largest_of_some_units():
    """Which one it is does not change along the derivatives."""
    with pm.Model() as model:
        w, v = normal("w", D, 2 * H), normal("v", H)
        pm.Bernoulli("y", logit_p=(X @ w).reshape((N, H, 2)).max(axis=2) @ v, observed=BINARY)

    def rows(theta):
        w, v = split(theta, (D, 2 * H), (H,))
        units = (X @ w).reshape(N, H, 2)
        return bernoulli(np.where(units[..., 0].real > units[..., 1].real, units[..., 0], units[..., 1]) @ v, BINARY)

    check(model, rows, "layers")


@pytest.mark.parametrize("name", ["bernoulli, relu", "categorical, softmax", "normal, several outputs"])
def test_matrices_of_networks(name):
    make, rows, _ = NETWORKS[name]
    check_matrix(make(), rows, "layers")


def test_the_matrix_of_a_minibatch():
    """A row of the batch counts N / 5 times."""
    x, y = pm.Minibatch(X, BINARY, batch_size=5)
    model = one_layer(x, y, N)
    [at] = [rows.get_value() for rows in LogDensity(model, "quick").minibatches.rows]
    check_matrix(model, lambda theta: one_layer_rows(theta, at), "layers", scale=N / 5)


def test_gradients_that_take_too_much_memory_are_refused(monkeypatch):
    monkeypatch.setattr(matrix, "_MOST", N * 26 - 1)
    density = LogDensity(one_layer(), "quick")
    with pytest.raises(ValueError, match=r"gradients of 12 rows in 26 dimensions.*pm\.Minibatch, or family='diagonal'"):
        density.gauss_newton(np.zeros((1, 26))).whitened(random_state("full", 26, np.random.default_rng(1)))
    assert np.isfinite(density.gauss_newton(np.ones((1, 26))).diagonal()).all()


def test_as_many_units_as_rows():
    """The axis of rows is not told by its length."""
    check(one_layer(n_units=N), lambda theta: one_layer_rows(theta, n_units=N), "layers")


def test_data_of_a_length_that_is_not_known():
    with pm.Model() as model:
        x, y = pm.Data("x", X), pm.Data("labels", BINARY)
        w1, b1, w2, b2 = normal("w1", D, H), normal("b1", H), normal("w2", H), normal("b2")
        pm.Bernoulli("y", logit_p=pt.maximum(x @ w1 + b1, 0) @ w2 + b2, observed=y)
    density = check(model, one_layer_rows, "layers")
    with model:
        pm.set_data({"x": X[:7], "labels": BINARY[:7]})
    compare(density, np.full((1, density.n_dim), 0.3), lambda point: one_layer_rows(point, slice(7)))


# --- weights that are used more than once -----------------------------------------------------------------------------


def tied(theta):
    w, b = split(theta, (D, H), H)
    return -0.5 * (REAL - (np.tanh(np.tanh(X @ w + b) @ w.T) @ w) @ b) ** 2


def test_weights_and_their_transpose_and_biases_as_weights():
    with pm.Model() as model:
        w, b = normal("w", D, H), normal("b", H)
        hidden = pm.math.tanh(pm.math.tanh(X @ w + b) @ w.T) @ w
        pm.Normal("y", hidden @ b, 1.0, observed=REAL)
    check(model, tied, "layers")


# --- otherwise, axis by axis -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_units", [H, 2])
def test_rows_that_depend_on_each_other(n_units):
    """Hidden units less their means over rows, as of batch normalisation."""
    with pm.Model() as model:
        w1, w2 = normal("w1", D, n_units), normal("w2", n_units)
        hidden = X @ w1
        pm.Normal("y", pm.math.tanh(hidden - hidden.mean(axis=0)) @ w2, 1.0, observed=REAL)

    def rows(theta):
        w1, w2 = split(theta, (D, n_units), n_units)
        hidden = X @ w1
        return -0.5 * (REAL - np.tanh(hidden - hidden.mean(axis=0)) @ w2) ** 2

    check(model, rows, "axes")


@pytest.mark.parametrize("n_units", [H, 2])
def test_operations_that_are_not_known(n_units):
    with pm.Model() as model:
        w1, w2 = normal("w1", D, n_units), normal("w2", n_units)
        pm.Normal("y", pt.cumsum(X @ w1, axis=1) @ w2, 1.0, observed=REAL, total_size=3 * N)

    def rows(theta):
        w1, w2 = split(theta, (D, n_units), n_units)
        return -0.5 * (REAL - np.cumsum(X @ w1, axis=1) @ w2) ** 2

    check(model, rows, "axes", scale=3.0)
    check_matrix(model, rows, "axes", scale=3.0)


def test_effects_that_a_row_takes_twice():
    """(g_1 + g_2)^2, where a row has the same group in two columns."""
    pairs = np.stack([GROUP, np.where(np.arange(N) % 2, GROUP, (GROUP + 1) % 4)], axis=1)
    with pm.Model() as model:
        effect = normal("effect", 4)
        pm.Normal("y", effect[pairs].sum(axis=1), 1.0, observed=REAL)
    density = LogDensity(model, "quick")
    theta = np.random.default_rng(3).normal(size=(3, 4))
    compare(density, theta, lambda p: -0.5 * (REAL - p[pairs].sum(axis=1)) ** 2)


def test_squares_that_are_wrong_are_not_taken(monkeypatch, caplog):
    right = matrix.squares_by_rows

    def wrong(row, theta, weights):
        total = right(row, theta, weights)
        return pt.set_subtensor(total[-1], 1.1 * total[-1])

    monkeypatch.setattr(matrix, "squares_by_rows", wrong)
    with caplog.at_level(logging.DEBUG, logger="pymc.ngvi"):
        check(one_layer(), one_layer_rows, "axes")
    assert "not those of single rows" in caplog.text


def test_gradients_that_are_wrong_are_not_taken(monkeypatch, caplog):
    right = matrix.gradients_by_rows

    def wrong(row, theta, weights):
        total = right(row, theta, weights)
        return pt.set_subtensor(total[:, -1], 1.1 * total[:, -1])

    monkeypatch.setattr(matrix, "gradients_by_rows", wrong)
    with caplog.at_level(logging.DEBUG, logger="pymc.ngvi"):
        check_matrix(one_layer(), one_layer_rows, "axes")
    assert "not those of single rows" in caplog.text


# --- fits -------------------------------------------------------------------------------------------------------------


def test_long_steps_are_halved_without_hessians(monkeypatch):
    """As the first ones of a network would be, were they not small from the outset."""
    monkeypatch.setattr(decay, "_HELD", 0)
    searched = []

    def search(*arguments, **options):
        searched.append(arguments)
        return found(*arguments, **options)

    found = decay.search
    monkeypatch.setattr(decay, "search", search)
    monkeypatch.setattr(decay, "pilot_fit", lambda *arguments: pytest.fail("a solution by Hessians"))
    x, y = pm.Minibatch(np.tile(X, (30, 1)), np.tile(BINARY, 30), batch_size=120)
    with one_layer(x, y, 30 * N, n_units=50), pytest.warns(pymc_ngvi.ConvergenceWarning, match="iteration limit"):
        approx = pm.fit(20, method="ngvi", estimator="gauss_newton", step="decay", random_seed=1, progressbar=False)
    assert searched
    assert approx.elbo.value > -350.0


N_FAR = 400
FAR_X = _RNG.normal(size=(N_FAR, 2))
FAR_Y = 50.0 + FAR_X @ [3.0, -2.0] + 2.0 * _RNG.normal(size=N_FAR)


def far_regression(batch_size=None):
    """From 0, the mean is 25 standard deviations of the noise away, and squares of gradients are thousands of times too
    large.
    """
    x, y = (FAR_X, FAR_Y) if batch_size is None else pm.Minibatch(FAR_X, FAR_Y, batch_size=batch_size)
    with pm.Model() as model:
        slope, intercept = pm.Normal("slope", 0, 10, shape=2), pm.Normal("intercept", 0, 100)
        noise = pm.HalfNormal("noise", 10)
        pm.Normal("y", intercept + x @ slope, noise, observed=y, total_size=N_FAR)
    return model


@pytest.mark.parametrize(("batch_size", "seed"), [(None, 1), (80, 1), pytest.param(80, 2, marks=pytest.mark.slow)])
def test_a_far_start_is_left_behind(batch_size, seed):
    """Steps count once the ELBO has stopped rising: else they are too small before the data are reached."""
    quick = {"method": "ngvi", "backend": "quick", "progressbar": False}
    with far_regression():
        best = pm.fit(family="diagonal", **quick)
    with far_regression(batch_size), warnings.catch_warnings():
        warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)  # it is not waited for the end
        approx = pm.fit(400, estimator="gauss_newton", random_seed=seed, **quick)
    assert approx.record.step == "decay"
    # A batch is a fifth of the data: the last iterate of 400 is .1 to .2 standard deviations off.
    np.testing.assert_array_less(np.abs(approx.mean_flat - best.mean_flat) / best.sd_flat, 0.3)
    np.testing.assert_allclose(approx.sd_flat, best.sd_flat, rtol=0.15)


def test_large_networks_take_limited_steps():
    """Beyond some thousands of weights, steps 2/(2 + t) take long to leave a far place; what is named is taken."""
    x = _RNG.normal(size=(4, 130))
    with pm.Model() as model:
        w1, w2 = normal("w1", 130, 40), normal("w2", 40)
        pm.Normal("y", pm.math.tanh(x @ w1) @ w2, 1.0, observed=np.arange(4.0))
    density = LogDensity(model, "quick")
    assert options_for({"estimator": "gauss_newton"}, density).choice == Choice(
        "diagonal", "natural", "gauss_newton", "ivon"
    )
    for given in ({"step": "decay"}, {"family": "block"}):
        assert options_for({"estimator": "gauss_newton", **given}, density).choice.step == "decay"
    assert options_for({"estimator": "gauss_newton"}, LogDensity(one_layer(), "quick")).choice.step == "decay"
