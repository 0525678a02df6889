"""One runner per method: fit a model and return posterior draws on the constrained scale.

Only the call of a runner is timed. What is needed to judge the result afterwards is left to
``Outcome.describe``, which is called when the clock has stopped. Nothing is tuned: every method
runs with its own default settings, apart from the number of posterior draws.
"""

import importlib
import importlib.util

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pymc as pm

from measure import Array, Density, Gaussian, coordinate_names, unconstrain
from pymc.variational import Approximation
from pymc.variational.approximations import FullRank
from xarray import DataTree

N_DRAWS = 2_000
ADVI_ITERATIONS = 10_000
DADVI_FIXED_DRAWS = 30


@dataclass(frozen=True)
class Description:
    """Moments of an approximation on the unconstrained scale.

    Attributes
    ----------
    names : list of str
        Coordinate names, in the order of the arrays.
    mean, sd : ndarray, shape (d,)
        Moments.
    how : str
        Where the moments come from.
    density : Density or None
        The approximation itself where its normalised density is known, on flat vectors in the
        order of the value variables of the model.
    """

    names: list[str]
    mean: Array
    sd: Array
    how: str
    density: Density | None = None


@dataclass(frozen=True)
class Outcome:
    """What a runner returns.

    Attributes
    ----------
    posterior : DataTree
        Draws on the constrained scale.
    describe : callable
        Returns the `Description`; not timed.
    facts : dict
        Counts and other columns of the results, where known.
    """

    posterior: DataTree
    describe: Callable[[], Description]
    facts: dict[str, object] = field(default_factory=dict)


Runner = Callable[[pm.Model, int], Outcome]


def run_ngvi(model: pm.Model, seed: int, **options: object) -> Outcome:
    """Natural-gradient variational inference, this package: an exact posterior where the default takes one."""
    with model:
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **options)
    idata = approx.sample(N_DRAWS, random_seed=1)
    facts = {
        "n_gradients": approx.n_gradients,
        "n_hessians": approx.n_hessians,
        "n_iterations": approx.n_iterations,
        "converged": approx.converged,
        "fit_status": str(approx.status),
        "gap": float(approx.gap),
        "compile_seconds": float(approx.compile_seconds),
    }

    def describe() -> Description:
        names = coordinate_names(model)
        if approx.is_exact:
            return Description(names, approx.mean_flat, approx.sd_flat, "weighted draws")
        return Description(names, approx.mean_flat, approx.sd_flat, "exact moments", _FlatDensity(approx))

    return Outcome(idata["posterior"], describe, facts)


def run_ngvi_gaussian(model: pm.Model, seed: int) -> Outcome:
    """Stop at the Gaussian fit of this package."""
    return run_ngvi(model, seed, posterior="gaussian")


def run_advi(model: pm.Model, seed: int, method: str = "advi") -> Outcome:
    """Mean-field ADVI of PyMC."""
    with model:
        approx = pm.fit(ADVI_ITERATIONS, method=method, random_seed=seed, progressbar=False)
    idata = approx.sample(N_DRAWS, random_seed=seed)
    facts = {"n_gradients": ADVI_ITERATIONS, "n_iterations": ADVI_ITERATIONS}
    return Outcome(idata["posterior"], partial(_describe_pymc, model, approx), facts)


def run_fullrank_advi(model: pm.Model, seed: int) -> Outcome:
    """Full-rank ADVI of PyMC."""
    return run_advi(model, seed, method="fullrank_advi")


def run_dadvi(model: pm.Model, seed: int) -> Outcome:
    """Deterministic ADVI of pymc-extras."""
    import pymc_extras as pmx

    with model:
        idata = pmx.fit(
            method="dadvi",
            n_fixed_draws=DADVI_FIXED_DRAWS,
            n_draws=N_DRAWS,
            random_seed=seed,
            progressbar=False,
        )
    optimum = idata["optimizer_result"]
    facts = {
        "n_gradients": _times(DADVI_FIXED_DRAWS, optimum.get("nfev")),
        "n_hvps": _times(DADVI_FIXED_DRAWS, optimum.get("nhev")),
        "n_iterations": _times(1, optimum.get("nit")),
    }

    def describe() -> Description:
        # The optimiser works on a flat vector in the order of the value variables.
        mean, log_sd = np.split(optimum["x"].to_numpy(), 2)
        return _describe_gaussian(model, Gaussian(mean, np.exp(log_sd)))

    return Outcome(idata["posterior"], describe, facts)


def run_laplace(model: pm.Model, seed: int) -> Outcome:
    """Laplace approximation of pymc-extras, around the mode without the Jacobian (its default)."""
    import pymc_extras as pmx

    with model:
        idata = pmx.fit(method="laplace", draws=N_DRAWS, random_seed=seed, progressbar=False)
    optimum = idata["optimizer_result"]
    facts = {
        "n_gradients": _times(1, optimum.get("njev")),
        "n_iterations": _times(1, optimum.get("nit")),
    }
    return Outcome(idata["posterior"], partial(_describe_laplace, model, idata["fit"]), facts)


def run_pathfinder(model: pm.Model, seed: int) -> Outcome:
    """Multi-path Pathfinder of pymc-extras."""
    import pymc_extras as pmx

    with model:
        idata = pmx.fit(method="pathfinder", num_draws=N_DRAWS, random_seed=seed, progressbar=False)
    return Outcome(idata["posterior"], partial(_describe_draws, model, idata["posterior"]))


def run_nutpie(model: pm.Model, seed: int) -> Outcome:
    """NUTS of nutpie, 4 chains of 1,000 + 1,000 draws as ``pm.sample`` asks for.

    Its own default, 6 chains of 400 + 1,000, is about as much work.
    """
    import nutpie

    compiled = nutpie.compile_pymc_model(model)
    idata = nutpie.sample(compiled, chains=4, tune=1_000, draws=1_000, seed=seed, progress_bar=False)
    steps = [idata[group]["n_steps"].sum() for group in ("warmup_sample_stats", "sample_stats")]
    facts = {"n_gradients": int(sum(steps))}
    return Outcome(idata["posterior"], partial(_describe_draws, model, idata["posterior"]), facts)


OURS, GAUSSIAN = "ngvi", "ngvi_gaussian"

RUNNERS: dict[str, Runner] = {
    OURS: run_ngvi,
    GAUSSIAN: run_ngvi_gaussian,
    "advi": run_advi,
    "fullrank_advi": run_fullrank_advi,
    "dadvi": run_dadvi,
    "laplace": run_laplace,
    "pathfinder": run_pathfinder,
    "nutpie": run_nutpie,
}

IMPORTS: dict[str, tuple[str, ...]] = {
    OURS: ("pymc_ngvi",),
    GAUSSIAN: ("pymc_ngvi",),
    "dadvi": ("pymc_extras", "pymc_extras.inference.dadvi.dadvi"),
    "laplace": ("pymc_extras", "pymc_extras.inference.laplace_approx.laplace"),
    "pathfinder": ("pymc_extras", "pymc_extras.inference.pathfinder.pathfinder"),
    "nutpie": ("nutpie",),
}


def check_installed(methods: Iterable[str]) -> None:
    """Exit with a sentence if a package that one of the methods needs cannot be imported.

    Raises
    ------
    SystemExit
        If a package is missing.
    """
    for method in methods:
        package = next(iter(IMPORTS.get(method, ("pymc",))))
        if importlib.util.find_spec(package) is None:
            raise SystemExit(
                f"{method} needs {package}, which is not importable: install it, leave {method} "
                "out, or set PYTHONPATH to a checkout of it."
            )


def import_method(method: str) -> None:
    """Import what a user of the method imports, so that it is not part of the timed call.

    For all methods that is `arviz_base` too, which PyMC imports when it first makes a DataTree.
    """
    for module in ("arviz_base", *IMPORTS.get(method, ())):
        importlib.import_module(module)


@dataclass(frozen=True)
class _FlatDensity:
    """The density of one of our approximations."""

    approx: object

    def draw(self, n: int, seed: int) -> Array:
        return np.asarray(self.approx.draw_flat(n, random_seed=seed))

    def log_density(self, theta: Array) -> Array:
        return np.asarray(self.approx.log_q(theta))


def _describe_gaussian(model: pm.Model, gaussian: Gaussian) -> Description:
    names = coordinate_names(model)
    return Description(names, gaussian.mean, gaussian.sd, "exact moments", gaussian)


def _describe_pymc(model: pm.Model, approx: Approximation) -> Description:
    """Read the Gaussian of a PyMC approximation, whose order of variables is its own."""
    [group] = approx.groups
    point = model.initial_point()
    ordering = {name: info[1] for name, info in group.ordering.items()}
    order = np.concatenate([np.arange(group.ddim)[ordering[v.name]] for v in model.value_vars])
    assert len(order) == sum(value.size for value in point.values())
    mean = approx.mean.eval()[order]
    if isinstance(approx, FullRank):
        covariance = approx.cov.eval()[np.ix_(order, order)]
        return _describe_gaussian(model, Gaussian.from_covariance(mean, covariance))
    return _describe_gaussian(model, Gaussian(mean, approx.std.eval()[order]))


def _describe_laplace(model: pm.Model, fit: DataTree) -> Description:
    """Read mean and covariance, whose labelled order is that of a frozen copy of the model."""
    names = coordinate_names(model)
    labels = fit["mean_vector"].coords["rows"].to_numpy().tolist()
    order = [labels.index(name) for name in names]
    mean = fit["mean_vector"].to_numpy()[order]
    covariance = fit["covariance_matrix"].to_numpy()[np.ix_(order, order)]
    try:
        return _describe_gaussian(model, Gaussian.from_covariance(mean, covariance))
    except np.linalg.LinAlgError:
        sd = np.sqrt(np.maximum(np.diag(covariance), 0))
        return Description(names, mean, sd, "exact moments, covariance not positive definite")


def _describe_draws(model: pm.Model, posterior: DataTree) -> Description:
    draws = unconstrain(posterior, model)
    how = f"{len(draws):,} draws"
    return Description(coordinate_names(model), draws.mean(axis=0), draws.std(axis=0, ddof=1), how)


def _times(factor: int, count: object) -> int | None:
    return None if count is None else factor * int(count)
