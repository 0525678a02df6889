"""The plan: its table, its order, reasons, and what comes of a nested posterior without a Gaussian fit before it."""

import contextlib
import functools
import math

import cloudpickle
import numpy as np
import pymc as pm
import pytest

from latent_models import grouped, level, process

import pymc_ngvi

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.core.messages import Failed, Reason, Unavailable
from pymc_ngvi.core.prices import Work
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.fitting.options import options_for
from pymc_ngvi.nested.posterior import latent_rows_of, nested_posterior
from pymc_ngvi.posteriors import kinds as latent_gaussian
from pymc_ngvi.posteriors import kinds as trees
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.plan import Candidate, Decision, Plan, in_order
from pymc_ngvi.results import choice

#: Hyperparameters of a nested posterior, and points of the process.
FEW, N = 1_500, 8


def fit(model, **options):
    return fit_ngvi(model=model, random_seed=1, progressbar=False, **options)


@pytest.fixture
def _of_few_values(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.nested.posterior.n_values_of", lambda given: FEW)


@functools.cache
def nested_of_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pymc_ngvi.nested.posterior.n_values_of", lambda given: FEW)
        return fit(process(N))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_is_aligned_and_has_all_candidates():
    plan = Plan(
        (
            Candidate("gaussian", Decision.CAME_FIRST, 0.3),
            Candidate("exact", Decision.FAILED, 1.64, 1.0, "k-hat is 0.9"),
            Candidate("nested", Decision.TAKEN, 1_234.0, 1 / 3),
        ),
        "No other posterior was tried.",
    )
    assert str(plan).splitlines() == [
        "posterior  seconds  expected      outcome",
        "Gaussian       0.3  approximate   came first",
        "exact          1.6  exact         failed: k-hat is 0.9",
        "nested       1,234  may be exact  taken",
        "No other posterior was tried.",
    ]
    assert plan.taken.kind == "nested"


def test_what_is_soon_sure_to_be_exact_is_first_then_it_is_by_price_over_chance():
    exact, dear, sure, unsure, last = (Candidate(*c) for c in [("exact", Decision.NOT_NEEDED, 1.0, 1.0),
        ("exact", Decision.NOT_NEEDED, 9.0, 1.0), ("nested", Decision.NOT_NEEDED, 0.8, 1.0),
        ("nested", Decision.NOT_NEEDED, 2.0, 1 / 3),
        ("moved", Decision.NOT_NEEDED, 3.5, 1 / 2)])  # fmt: skip
    assert in_order([exact, sure]) == [sure, exact]
    assert in_order([last, unsure, exact]) == [exact, unsure, last]
    assert in_order([dear, last, unsure]) == [unsure, last, dear]
    refused, gaussian = Candidate("exact", Decision.REFUSED), Candidate("gaussian", Decision.TAKEN, 100.0)
    assert in_order([refused, unsure, gaussian]) == [gaussian, unsure, refused]
    assert math.isinf(gaussian.expected_seconds)


def test_what_is_expected_of_rows_given_hyperparameters():
    """Normal data leave latent variables Gaussian; binary ones do not."""
    assert KINDS["nested"].chance(latent_rows_of(LogDensity(level()))) == 1.0
    assert KINDS["nested"].chance(latent_rows_of(LogDensity(process()))) < 1.0


# --- after a Gaussian fit ---------------------------------------------------------------------------------------------


def test_the_plan_of_an_exact_posterior():
    approx = fit(grouped())
    plan = approx.plan
    assert plan.taken.kind == "exact"
    assert plan.of("gaussian").outcome is Decision.CAME_FIRST
    assert plan.taken.seconds > plan.of("gaussian").seconds
    assert fit(grouped(), posterior="gaussian").plan is None
    assert fit(grouped(), family="full").plan is None


@pytest.mark.usefixtures("_no_last_resort")
def test_each_reason_is_in_the_table():
    dear = fit(grouped(), max_seconds=0.1).plan
    assert dear.of("exact").outcome is Decision.TOO_DEAR
    assert "max_seconds=" in dear.of("exact").reason
    assert dear.of("nested").outcome is Decision.TOO_DEAR
    assert dear.taken.kind == "gaussian"
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=61)
        pm.Potential("p", -(x.sum() ** 4) - pm.math.exp(x[0]))
    none = fit(model).plan
    assert none.taken.kind == "gaussian"
    assert none.of("exact").outcome is none.of("nested").outcome is Decision.REFUSED
    assert "61 parameters are more than the 60" in none.of("exact").reason
    assert fit(grouped(), posterior="exact").plan.of("nested").outcome is Decision.NOT_ASKED


@pytest.fixture
def tried(monkeypatch, _no_last_resort):
    """Both kinds fail, and there is no last resort; what is tried at how many seconds is noted."""
    noted = []

    @contextlib.contextmanager
    def task(title, seconds):
        noted.append(f"{title.split()[0]} at {seconds:g}")
        yield

    def run(start, found, work, *, is_only):
        work.expect(run.turns_out)
        work.count(run.turns_out)
        raise Failed(Reason.NOT_PASSED, "it failed")

    def priced(exact, nested, chance, turns_out=None):
        run.turns_out = exact if turns_out is None else turns_out
        nested = Candidate("nested", seconds=nested, chance=chance)
        for name, value in {"possible": None, "comes_first": False, "price": nested}.items():
            monkeypatch.setattr(KINDS["nested"], name, lambda *args, value=value, **options: value)
        monkeypatch.setattr(trees.TreeKind, "seconds", lambda *args, by_rows: exact)
        return noted

    monkeypatch.setattr(choice, "task", task)
    monkeypatch.setattr(KINDS["exact"], "run", run)
    monkeypatch.setattr(
        KINDS["nested"], "run", lambda start, found, work, is_only: run(start, found, Work(), is_only=is_only)
    )
    return priced


@pytest.mark.parametrize(
    ("turns_out", "nested", "chance", "order"),
    [
        (2.0, 5.0, 1.0, ["Exact at 1", "Nested at 5"]),  # it goes on
        (12.0, 5.0, 1.0, ["Exact at 1", "Nested at 5"]),
        (12.0, 35.0, 1 / 3, ["Exact at 1"]),  # the other one is too dear
        (60.0, 15.0, 1.0, ["Exact at 1", "Nested at 15"]),  # too dear
    ],
)
def test_a_posterior_that_turns_out_to_take_longer(tried, turns_out, nested, chance, order):
    noted = tried(1.0, nested, chance, turns_out)
    plan = fit(grouped()).plan
    assert noted == order
    assert plan.of("exact").seconds == pytest.approx(turns_out)
    assert plan.of("exact").outcome is (Decision.TOO_DEAR if turns_out == 60.0 else Decision.FAILED)


# --- files ------------------------------------------------------------------------------------------------------------


# --- without a Gaussian fit before it ---------------------------------------------------------------------------------


def first(model, **given):
    density = LogDensity(model)
    options = options_for(given, density)
    candidates = choice.Candidates(choice.Choice(options.posterior, 1, options.max_seconds), density, None)
    return None if candidates.first() is None else candidates._plan()


def test_what_comes_before_any_gaussian_fit(monkeypatch):
    """Where log p is no sum over rows; by rows, where it is cheaper than a Gaussian fit and the exact posterior."""
    assert [c.kind for c in first(process()).candidates] == ["nested", "gaussian"]
    assert first(process(), posterior="gaussian") is None
    assert first(process(), max_seconds=0.01) is None
    assert next(iter(first(level()).candidates)).kind == "nested"  # in closed form
    assert first(grouped()) is None
    monkeypatch.setattr(latent_gaussian, "nested_seconds", lambda given: 0.01)
    monkeypatch.setattr(latent_gaussian.LatentGaussianKind, "least", 0.01)
    assert first(grouped()) is None  # trees are sure to be exact
    monkeypatch.setattr(trees.TreeKind, "chance", lambda self, found: 0.9)
    assert first(level()).candidates[0].kind == "nested"
    found = first(grouped())
    assert [c.kind for c in found.candidates] == ["nested", "exact", "gaussian"]
    assert found.of("nested").expected_seconds < found.of("exact").expected_seconds
    monkeypatch.setattr(RowsGiven, "is_concave", False)  # there may be other modes, which a Gaussian fit looks for
    assert first(grouped()) is None


def binary(n_groups=90, per_group=7):
    """No success in most groups, and a wide scale: given that, effects are far from a Gaussian."""
    group = np.repeat(np.arange(n_groups), per_group)
    with pm.Model() as model:
        sd = pm.Gamma("sd", 60.0, 12.0)
        effect = pm.Normal("effect", 0, sd, shape=n_groups)
        pm.Bernoulli("y", logit_p=effect[group], observed=(np.arange(len(group)) % 7 < group % 4 - 1).astype(int))
    return model


@pytest.mark.usefixtures("_nested_first")
def test_a_nested_posterior_gives_up_early_where_latent_variables_are_no_gaussian():
    """And the trees take over; it is not begun again."""
    approx = fit(binary())
    assert approx.is_exact
    assert not approx.is_nested
    given = latent_rows_of(approx.density)
    assert given.is_uneven
    assert KINDS["nested"].chance(given) < 0.1
    with pytest.raises(Unavailable, match="too far from a Gaussian"):
        nested_posterior(approx.density, None, 1, most_variance=1.5)
    assert nested_posterior(approx.density, None, 1).checks.variance > 1.0


def test_a_gaussian_is_made_when_it_is_asked_for(tmp_path):
    approx = nested_of_process()
    assert approx._gaussian is None
    with pytest.raises(AttributeError, match="has no q"):
        approx.q  # noqa: B018
    approx.save(tmp_path / "approx.nc")
    copied = cloudpickle.loads(cloudpickle.dumps(approx))
    loaded = pymc_ngvi.load(tmp_path / "approx.nc", process(N))
    same = fit(process(N), posterior="gaussian")
    for other in (loaded, copied):
        assert other._gaussian is None
        np.testing.assert_array_equal(other.gaussian.mean_flat, same.mean_flat)
        assert other.gaussian is other.gaussian
        assert other.gaussian.record.n_gradients == same.record.n_gradients
        assert other.gaussian.elbo == same.elbo
    assert other.is_nested
    assert other.elbo.value > same.elbo.value


def test_a_gaussian_is_refused_where_the_data_have_changed():
    with pm.Model() as model:
        y = pm.Data("y_data", np.arange(12) % 4)
        scale = pm.HalfNormal("scale", 1.0)
        f = pm.gp.Latent(cov_func=scale**2 * pm.gp.cov.ExpQuad(1, 0.3)).prior("f", X=np.linspace(0, 1, 12)[:, None])
        pm.Poisson("y", pm.math.exp(f), observed=y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pymc_ngvi.nested.posterior.n_values_of", lambda given: FEW)
        approx = fit(model)
    assert approx.plan.taken.kind == "nested"
    with model:
        pm.set_data({"y_data": np.arange(12) % 3})
    with pytest.raises(ValueError, match="The Gaussian fit can't be made with other data"):
        approx.gaussian  # noqa: B018
    with pytest.raises(ValueError, match="can't be refined with other data"):
        approx.refine()


def test_elbo_and_history_are_those_of_the_joint_distribution():
    approx = nested_of_process()
    with pytest.raises(ValueError, match=r"no iterations to show. approx.gaussian.plot_fit\(\) shows those of the"):
        approx.plot_fit()
    np.testing.assert_allclose(approx.hist, [-approx.elbo.value])
    assert approx.n_iterations == approx.checks.n_fits
    # log p(y) is above it, by what the conditional fits lack.
    assert 0.0 <= approx._state.log_normaliser[0] - approx.elbo.value < 2.0


@pytest.mark.usefixtures("_of_few_values")
def test_it_goes_on():
    approx = fit(process(N))
    before, size, fits = approx.mean_flat, approx.checks.effective_size, approx.n_iterations
    assert approx.refine(0) is approx
    assert len(approx.hist) == 1
    assert approx.refine() is approx
    assert len(approx.hist) == len(approx.gap_hist) == 2
    assert approx.checks.effective_size >= size
    assert approx.n_iterations > fits
    np.testing.assert_allclose((approx.mean_flat - before) / approx.sd_flat, 0.0, atol=8.0 / np.sqrt(size))
    with pytest.raises(ValueError, match=r"takes no tol, max_draws or executor. approx.gaussian.refine takes them"):
        approx.refine(tol=0.01)


@pytest.mark.usefixtures("_of_few_values")
def test_a_fit_begins_from_it():
    """From the Gaussian with its moments: none of all coordinates is made for that."""
    approx = nested_of_process()
    other = fit(process(N), start=approx, posterior="gaussian")
    assert approx._gaussian is None
    assert other.converged
