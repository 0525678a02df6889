"""Pictures show what they say: lines, limits and words of each, and that bad input is refused."""

import dataclasses
import logging
import sys

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor
import pytest
import xarray as xr

from matplotlib import pyplot
from numpy.testing import assert_allclose, assert_array_equal
from texts import run

from pymc_ngvi import Elbo, FitRecord, LogDensity, NGVIApproximation, Status
from pymc_ngvi.families import FullState
from pymc_ngvi.results.plotting import plot_comparison, plot_fit, plot_khat

RECORD = FitRecord(
    status=Status.CONVERGED, elbo=Elbo(-12.5, 0.02), gap=0.03, n_iterations=10, n_gradients=320, n_hessians=80,
    n_dropped=0, compile_seconds=0.25, run_seconds=0.5, family="full", update="natural", estimator="price",
    step="adaptive", backend="quick",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


def drawn(figure):
    """Draw, as saving does: warnings of the layout are raised here."""
    figure.canvas.draw()
    return figure


def lines_of(ax):
    return {line.get_label(): line for line in ax.lines}


def is_clipped(ax):
    """Tell whether the title, or the name of an axis, reaches out of the figure."""
    figure = drawn(ax.figure)
    renderer = figure.canvas.get_renderer()
    parts = [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]
    boxes = [part.get_window_extent(renderer) for part in parts if part.get_text()]
    return any(box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1 for box in boxes)


# --- the fit ----------------------------------------------------------------------------------------------------------


def ten_iterations():
    elbos = -12.5 - np.array([3_000.0, 900.0, 80.0, 9.0, 2.0, 0.5, 0.2, 0.1, 0.05, 0.0])
    return -elbos, np.geomspace(500.0, 0.02, 10)


def test_ten_iterations_are_drawn_one_by_one():
    losses, gaps = ten_iterations()
    elbo, gap = plot_fit(losses, gaps, RECORD, tol=0.05)
    line = lines_of(elbo)["on the draws in use"]
    assert_array_equal(line.get_xdata(), np.arange(1, 11))
    assert_array_equal(line.get_ydata(), -losses)
    assert line.get_marker() == "o"
    assert_array_equal(gap.lines[0].get_ydata(), gaps)
    assert gap.get_yscale() == "log"
    assert not is_clipped(elbo)
    assert not is_clipped(gap)


def test_the_end_and_the_tolerance_are_marked():
    elbo, gap = plot_fit(*ten_iterations(), RECORD, tol=0.05)
    end = lines_of(elbo)["at the end, on fresh draws: -12.50"]
    assert_array_equal(end.get_ydata(), [-12.5, -12.5])
    assert_array_equal(lines_of(gap)["tolerance: 0.05"].get_ydata(), [0.05, 0.05])
    mark = lines_of(gap)["at the end, on fresh draws: 0.030"]
    assert_allclose([mark.get_xdata()[0], mark.get_ydata()[0]], [10, 0.03])
    low, high = gap.get_ylim()
    assert low < 0.02
    assert high > 500.0
    assert len(plot_fit(*ten_iterations(), RECORD)[1].lines) == len(gap.lines) - 1


def test_values_that_are_not_finite_leave_gaps():
    losses, gaps = ten_iterations()
    losses[[0, 4]], gaps[[0, 4]] = [np.inf, np.nan], [np.inf, np.nan]
    elbo, gap = plot_fit(losses, gaps, RECORD)
    for ax in (elbo, gap):
        assert_array_equal(np.isnan(ax.lines[0].get_ydata()), np.isin(np.arange(10), [0, 4]))
        assert np.isfinite(ax.get_ylim()).all()


def test_title_says_how_the_fit_ended():
    losses, gaps = ten_iterations()
    title = plot_fit(losses, gaps, RECORD)[0].get_title(loc="left")
    assert title == "Converged after 10 iterations, gap 0.030 nats"
    stalled = dataclasses.replace(RECORD, status=Status.STALLED, n_iterations=1)
    ax = plot_fit(losses, gaps, stalled)[0]
    title = " ".join(ax.get_title(loc="left").split())
    assert title.startswith("Stalled after 1 iteration, gap 0.030 nats. No step raises the ELBO")
    assert not is_clipped(ax)


def test_nothing_to_show_is_refused():
    with pytest.raises(ValueError, match="no iteration was run"):
        plot_fit(np.empty(0), np.empty(0), RECORD)
    with pytest.raises(ValueError, match=r"tol .* positive; got -1"):
        plot_fit(*ten_iterations(), RECORD, tol=-1)


# --- importance weights -----------------------------------------------------------------------------------------------


def pareto_weights(k, n=4_000, seed=1):
    """Return log p and log q with weights whose tail is that of a generalised Pareto distribution."""
    uniform = np.random.default_rng(seed).random(n)
    return np.log1p(np.expm1(-k * np.log(uniform))), np.zeros(n)


@pytest.mark.parametrize("seed", [1, 2])
def test_curve_is_the_share_of_larger_weights(seed):
    log_p, log_q = pareto_weights(0.4, seed=seed)
    n = len(log_p)
    ax = plot_khat(log_p, log_q)
    weights = np.exp(log_p) / np.exp(log_p).mean()
    body, tail = ax.lines[0], ax.lines[1]
    n_tail = int(3 * np.sqrt(n))
    assert len(tail.get_xdata()) == n_tail
    x, y = np.concatenate([tail.get_data(), np.array(body.get_data())[:, 1:]], axis=1)
    at = [10, n_tail + 50, 2_000]
    assert_allclose(y[at], [np.mean(weights >= w * (1.0 - 1e-9)) for w in x[at]])
    assert_allclose(x[0], weights.max())


def test_title_says_what_khat_means():
    ax = plot_khat(*pareto_weights(1.3))
    title = " ".join(ax.get_title(loc="left").split())
    assert title.startswith("Pareto k-hat is 1.")
    assert "importance weights can't correct" in title
    assert not is_clipped(ax)


# --- beside a reference -----------------------------------------------------------------------------------------------


def tree_of(chains=1, draws=400, seed=1, shift=(0.0, 0.0), sizes=3, dim="effect", labels=("age", "dose", "visit")):
    rng = np.random.default_rng(seed)
    coords = {dim: list(labels)} if labels else {}
    data = {
        "level": (("chain", "draw"), shift[0] + rng.normal(size=(chains, draws))),
        "beta": (("chain", "draw", dim), shift[1] + rng.normal(size=(chains, draws, sizes))),
    }
    return xr.DataTree.from_dict({"posterior": xr.Dataset(data, coords=coords)})


def intervals_of(plot, name):
    """Return the ends of the longer interval of both, as drawn."""
    return {str(m): plot.viz["twig"][name].sel(model=m).item().get_xdata() for m in ("ngvi", "reference")}


def test_a_forest_has_the_intervals_of_both():
    ours, reference = tree_of(), tree_of(chains=4, draws=300, seed=2, shift=(3.0, 5.0))
    plot = plot_comparison(ours, reference, ci_probs=(0.5, 0.9))
    assert list(plot.viz["twig"].data_vars) == ["level", "beta[age]", "beta[dose]", "beta[visit]"]
    ends = intervals_of(plot, "beta[dose]")
    exact = ours["posterior"]["beta"].sel(effect="dose").quantile([0.05, 0.95]).values
    assert_allclose(ends["ngvi"], exact, atol=0.05)
    # Of 1,200 draws, 400 are used: three Monte Carlo errors.
    exact = reference["posterior"]["beta"].sel(effect="dose").quantile([0.05, 0.95]).values
    assert_allclose(ends["reference"], exact, atol=3 * 0.1)
    drawn(plot.viz["figure"].item())


def test_dims_may_have_other_names_and_the_labels_are_those_of_q():
    reference = tree_of(draws=100, seed=2, dim="beta_dim_0", labels=None, shift=(0.0, 5.0))
    plot = plot_comparison(tree_of(), reference, "beta")
    assert list(plot.viz["twig"].data_vars) == ["beta[age]", "beta[dose]", "beta[visit]"]
    assert intervals_of(plot, "beta[visit]")["reference"].min() > 2.0
    plot = plot_comparison(reference, tree_of(), "beta")
    assert list(plot.viz["twig"].data_vars) == ["beta[0]", "beta[1]", "beta[2]"]


def test_draws_of_all_chains_count():
    reference = tree_of(chains=2, draws=500)  # more than are used
    reference["posterior"]["level"].values[1] += 40.0
    ends = intervals_of(plot_comparison(tree_of(), reference, "level"), "level")["reference"]
    assert ends[0] < 3.0
    assert ends[1] > 37.0


@pytest.mark.parametrize(("kind", "n"), [("forest", 7), ("dist", 5), ("pair", 3)])
def test_those_that_differ_most_are_shown(kind, n):
    ours, reference = (tree_of(sizes=60, labels=None, seed=seed) for seed in (1, 2))
    far = [3, 17, 58, 4, 5, 41, 20][:n]
    for i in far:
        if i % 2:
            reference["posterior"]["beta"].values[..., i] += 2.0
        else:
            reference["posterior"]["beta"].values[..., i] *= 3.0
    plot = plot_comparison(ours, reference, kind=kind, max_coordinates=n)
    shown = plot.data.data_vars if kind != "forest" else plot.viz["twig"].data_vars
    assert list(shown) == [f"beta[{i}]" for i in sorted(far)]
    figure = drawn(plot.viz["figure"].item())
    texts = [text.get_text() for text in figure.texts] + [figure.get_suptitle()]
    assert f"{n} of 61 coordinates: those that differ most" in texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "violin"}, r"kind should be one of 'forest', 'dist', 'pair'; got 'violin'"),
        ({"var_names": "gamma"}, r"'gamma' is not among the variables .* 'beta', 'level'"),
        ({"var_names": ["beta[height]"]}, r"no coordinate 'beta\[height\]'; there are beta\[age\]"),
        ({"var_names": []}, "no coordinate to show"),
        ({"max_coordinates": 0}, "max_coordinates should be at least 1; got 0"),
        ({"reference": np.zeros(3)}, "reference should be a DataTree .* got a ndarray"),
        ({"reference": tree_of(sizes=2, labels=("a", "b"))}, r"'beta' has shape \(3,\) in q and \(2,\)"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_comparison(**{"draws": tree_of(), "reference": tree_of(seed=2), **arguments})


# --- from the result of a fit -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def density():
    with pm.Model(coords={"effect": ["age", "dose"]}) as model:
        scale = pm.HalfNormal("scale", 1.0)
        beta = pm.Normal("beta", 0.0, 1.0, dims="effect")
        pm.Deterministic("total", beta.sum())
        pm.Normal("y", beta.sum(), scale, observed=[0.3, 1.2, -0.4])
    return LogDensity(model)


@pytest.fixture
def approx(density):
    result = NGVIApproximation(density, FullState(np.zeros(3), 0.5 * np.eye(3)), random_seed=1)
    result.record, (result.hist, result.gap_hist) = RECORD, ten_iterations()
    return result


def test_plot_fit_needs_a_fit(density):
    with pytest.raises(RuntimeError, match=r"plot_fit\(\) is known after a fit only"):
        NGVIApproximation(density, FullState(np.zeros(3), np.eye(3))).plot_fit()


def test_plot_comparison_shows_free_variables(approx):
    reference = approx.sample(300, random_seed=5)
    plot = approx.plot_comparison(reference, random_seed=6)
    assert list(plot.viz["twig"].data_vars) == ["scale", "beta[age]", "beta[dose]"]
    assert intervals_of(plot, "scale")["ngvi"].min() > 0.0
    assert list(approx.plot_comparison(reference, "total").viz["twig"].data_vars) == ["total"]


@pytest.mark.parametrize("module", ["matplotlib", "arviz_plots"])
def test_what_is_missing_is_named(approx, monkeypatch, module):
    reference = approx.sample(100)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {module.replace('_', '-')}"):
        approx.plot_comparison(reference)


def test_the_examples_of_the_page_run(monkeypatch):
    monkeypatch.setattr(logging.getLogger("pymc"), "level", logging.ERROR)  # R-hat of 200 draws
    # PyMC's own functions without compilation: NUTS and ADVI are run for the picture only.
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        run((Path(__file__).parents[2] / "docs" / "plots.md").read_text(encoding="utf-8"))
