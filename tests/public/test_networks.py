"""Networks in plain PyMC, fitted by Gauss-Newton: predictions for new rows, from all data and from minibatches."""

import logging
import warnings

import numpy as np
import pymc as pm
import pytest

from pymc.model.transform import remove_minibatched_nodes

import pymc_ngvi  # noqa: F401  (registers the method)

from pymc_ngvi import ConvergenceWarning

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N, BATCH, NEW, UNITS = 120, 30, 17, 4
_RNG = np.random.default_rng(5)
X = _RNG.uniform(-1, 1, (N, 2))
LABELS = (X[:, 0] * X[:, 1] > 0).astype(int)
X_NEW = _RNG.uniform(-1, 1, (NEW, 2))
COORDS = {"feature": ["east", "north"], "unit": range(UNITS)}
START = {"w1": _RNG.normal(size=(2, UNITS)), "w2": _RNG.normal(size=UNITS)}
#: As many draws as the comparisons with draws of labels need: the standard error of a frequency is at most .016.
DRAWS = 1_000
WEIGHTS = ["w1", "b1", "w2", "b2"]


def network(x, y, **options):
    """Add a network to the model."""
    w1 = pm.Normal("w1", 0, 2, dims=("feature", "unit"))
    b1 = pm.Normal("b1", 0, 1, dims="unit")
    w2 = pm.Normal("w2", 0, 2, dims="unit")
    b2 = pm.Normal("b2", 0, 1)
    dims = options.get("dims")
    p = pm.Deterministic("p", pm.math.sigmoid(pm.math.tanh(x @ w1 + b1) @ w2 + b2), dims=dims)
    pm.Bernoulli("y", p=p, observed=y, **options)


def by_hand(posterior, x):
    """Return the probabilities of each draw, (n_draws, n_rows)."""
    w1, b1, w2, b2 = (np.concatenate(posterior[name].to_numpy()) for name in WEIGHTS)
    hidden = np.tanh(np.einsum("nf,sfu->snu", x, w1) + b1[:, None])
    return 1 / (1 + np.exp(-np.einsum("snu,su->sn", hidden, w2) - b2[:, None]))


def fit(model, n=40):
    """Fit for a few steps: predictions are compared with the draws, wherever the fit got to.

    The start is the fit's, not the model's: PyMC has no copies of models with initial values.
    """
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return pm.fit(
            n,
            method="ngvi",
            estimator="gauss_newton",
            step="decay",
            start=START,
            random_seed=1,
            progressbar=False,
            backend="quick",
        )


def predict(model, tree, **options):
    with model:
        return pm.sample_posterior_predictive(
            tree,
            var_names=["p", "y"],
            compile_kwargs={"mode": "FAST_COMPILE"},
            random_seed=2,
            progressbar=False,
            **{"predictions": True} | options,
        )


def check(predicted, tree, x):
    """Probabilities are those of the draws at these rows, and labels are drawn with these."""
    expected = by_hand(tree.posterior, x)
    np.testing.assert_allclose(np.concatenate(predicted["p"].to_numpy()), expected, rtol=1e-10)
    labels = np.concatenate(predicted["y"].to_numpy())
    assert labels.shape == expected.shape
    # Five standard errors of each of the frequencies.
    error = np.sqrt((expected * (1 - expected)).mean(axis=0) / DRAWS)
    assert (np.abs(labels.mean(axis=0) - expected.mean(axis=0)) < 5 * error).all()


@pytest.fixture(scope="module")
def whole():
    """A network on all rows, as data with dims, and its fit."""
    with pm.Model(coords=COORDS | {"row": np.arange(N)}) as model:
        x = pm.Data("x", X, dims=("row", "feature"))
        y = pm.Data("labels", LABELS, dims="row")
        network(x, y, dims="row")
    return model, fit(model)


@pytest.fixture(scope="module")
def batches():
    """A network on batches of the model's data, which have dims, and its fit."""
    with pm.Model(coords=COORDS | {"row": np.arange(N)}) as model:
        data = pm.Data("x", X, dims=("row", "feature")), pm.Data("labels", LABELS, dims="row")
        network(*pm.Minibatch(*data, batch_size=BATCH), total_size=N)
    return model, fit(model)


def test_new_rows_with_dims(whole):
    model, approx = whole
    tree = approx.sample(DRAWS, random_seed=3)
    assert tree.posterior["p"].sizes["row"] == N
    with model:
        pm.set_data({"x": X_NEW, "labels": np.zeros(NEW, int)}, coords={"row": np.arange(N, N + NEW)})
    try:
        predictions = predict(model, tree).predictions
        with pytest.warns(UserWarning, match="The data 'x', 'labels' were changed after the fit"):
            later = approx.sample(2, random_seed=3)
    finally:
        with model:
            pm.set_data({"x": X, "labels": LABELS}, coords={"row": np.arange(N)})
    check(predictions, tree, X_NEW)
    assert predictions["p"].dims == ("chain", "draw", "row")
    np.testing.assert_array_equal(predictions["row"], np.arange(N, N + NEW))
    # Draws follow the data, too, and so do their coordinates.
    np.testing.assert_allclose(np.concatenate(later.posterior["p"]), by_hand(later.posterior, X_NEW), rtol=1e-10)
    np.testing.assert_array_equal(later.posterior["row"], np.arange(N, N + NEW))


def test_new_rows_without_dims():
    with pm.Model(coords=COORDS) as model:
        x = pm.Data("x", X)
        network(x, LABELS, shape=x.shape[0])
    tree = fit(model, n=5).sample(DRAWS, random_seed=3)
    with model:
        pm.set_data({"x": X_NEW})
    check(predict(model, tree).predictions, tree, X_NEW)


def test_a_fit_on_batches_predicts_all_rows_and_new_ones_without_the_batches(batches):
    model, approx = batches
    tree = approx.sample(DRAWS, random_seed=3)
    all_rows = remove_minibatched_nodes(model)
    check(predict(all_rows, tree, predictions=False).posterior_predictive, tree, X)
    with all_rows:
        pm.set_data({"x": X_NEW, "labels": np.zeros(NEW, int)}, coords={"row": np.arange(N, N + NEW)})
    check(predict(all_rows, tree).predictions, tree, X_NEW)


@pytest.mark.parametrize("n_rows", [NEW, BATCH], ids=["other-length", "length-of-a-batch"])
def test_a_fit_on_batches_predicts_in_a_second_model(batches, n_rows):
    """As many new rows as a batch has: nothing but the values tells one from the other."""
    tree = batches[1].sample(DRAWS, random_seed=3)
    rows = np.random.default_rng(6).uniform(-1, 1, (n_rows, 2))
    with pm.Model(coords=COORDS) as second:
        network(rows, None)
    check(predict(second, tree).predictions, tree, rows)


def test_draws_of_a_fit_on_batches_have_rows_of_a_batch_by_name_only(batches, caplog):
    approx = batches[1]
    with caplog.at_level(logging.INFO, "pymc.ngvi"):
        posterior = approx.sample(5, random_seed=3).posterior
    assert list(posterior.data_vars) == WEIGHTS
    assert caplog.messages == [
        "Without 'p', of the rows of one minibatch: pm.sample_posterior_predictive has them, in a model of all rows or "
        "of new ones."
    ]
    assert approx.sample(8, var_names="p").posterior["p"].shape == (4, 2, BATCH)
    assert list(approx.summary(var_names=["b2"]).table.index) == ["b2"]


def test_other_deterministics_of_a_fit_on_batches_are_in_its_draws():
    """Those of weights, and those that only ask how many rows a batch has."""
    with pm.Model(coords=COORDS) as model:
        x, y = pm.Minibatch(X, LABELS.astype(float), batch_size=BATCH)
        network(x, y, total_size=N)
        pm.Deterministic("size", pm.math.sqrt((model["w1"] ** 2).sum()))
        pm.Deterministic("share", model["b2"] * x.shape[0] / N)
        pm.Deterministic("largest", model["p"].max())
    posterior = fit(model, n=2).sample(5, random_seed=3).posterior
    assert list(posterior.data_vars) == [*WEIGHTS, "size", "share"]
    np.testing.assert_allclose(posterior["size"], np.sqrt((posterior["w1"] ** 2).sum(("feature", "unit"))))


def test_log_likelihoods_of_a_fit_on_batches_are_those_of_a_model_of_all_rows(batches):
    """PyMC would give each draw the rows of another batch, scaled to all."""
    approx = batches[1]
    with pytest.raises(ValueError, match="each draw would have the rows of another batch"):
        approx.sample(5, log_likelihood=True)
    tree = approx.sample(50, random_seed=3)
    with pm.Model(coords=COORDS) as second:
        network(X, LABELS)
    pm.compute_log_likelihood(tree, model=second, progressbar=False)
    p = by_hand(tree.posterior, X)
    found = np.concatenate(tree["log_likelihood"]["y"])
    np.testing.assert_allclose(found, np.log(np.where(LABELS == 1, p, 1 - p)), rtol=1e-10)
