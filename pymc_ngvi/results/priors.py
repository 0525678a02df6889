"""Other priors: the posterior under them, by weights, and how much the posterior depends on those that it has."""

import functools

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from scipy.special import softmax

from pymc_ngvi.core.messages import checked_names
from pymc_ngvi.core.psis import khat_limit, pareto_khat, weigh
from pymc_ngvi.core.sizes import seed_of
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer, TermSums, log_densities, unconstrained
from pymc_ngvi.density.new_priors import NewPriors
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.reading.roles import top_level_priors
from pymc_ngvi.results.diagnosis.diagnosis import Kept
from pymc_ngvi.results.distributions import Posterior, one_chain, to_datatree, to_multitrace
from pymc_ngvi.results.sampling import Names, narrow
from pymc_ngvi.results.summary import Planned, imported, paragraphs
from pymc_ngvi.results.weighted import ElsewhereDensity, Weighted, joint_draws, weighted


def reweighted(posterior: Posterior, priors: Mapping[str, Any], draws: int, rng: np.random.Generator) -> Weighted:
    """Return the posterior under other priors; see `NGVIApproximation.with_prior`."""
    posterior.check_weighable(draws)
    new, old, theta = NewPriors.of(posterior.model, posterior.layout, priors), posterior.density, None
    with posterior.with_data_of_fit():
        made, doubts = joint_draws(posterior, draws, rng)
        log_ratio = new.log_ratio(made.theta)
        if not np.isfinite(made.reweighted(log_ratio).log_weights).any():
            raise ValueError(
                f"The new prior of {' or '.join(new.names)} is 0 at all draws of the posterior: fit again."
            )
        before, weights = (softmax(weigh(of.log_weights)[0]) for of in (made, made.reweighted(log_ratio)))
        doubts = (*new.missed(made.theta, before, weights, seed_of(rng)), *doubts)
        if old.is_sharded or old.is_streamed:
            where = "shards that are built with" if old.is_sharded else "the stream with a model that has"
            density: Any = ElsewhereDensity(old, "its priors are others than those of the models of its data")
            cure = f"Fit {where} these priors."
        else:
            density = LogDensity(new.changed_model, backend=old.backend, checks_derivatives=False)
            cure = 'Fit the model with these priors: pm.fit(method="ngvi", model=found.model).'
            theta = _in_coordinates_of(density, posterior, new, made.theta)
    what = f"Posterior with other priors of {', '.join(f'`{name}`' for name in new.names)}."
    made_of = weighted(posterior, made, log_ratio, what, doubts, cure, density, draws, theta)
    return made_of._replace(improper=new.improper)


def _in_coordinates_of(density: ModelDensity, posterior: Posterior, new: NewPriors, theta: Array) -> Array | None:
    """Return draws in the coordinates of a model with other priors; None where these are the same."""
    before, after = posterior.model, density.model
    differ = [
        name
        for name in new.names
        if type(before.rvs_to_transforms[before[name]]) is not type(after.rvs_to_transforms[after[name]])
    ]
    if not differ:
        return None
    values = Constrainer.of(posterior.density, deterministics=False)(theta)
    return unconstrained(density, differ, values, theta)


#: Powers between which sensitivity is measured: those of ArviZ, and of the R package priorsense.
_POWERS = (0.99, 1.01)
#: Parts of the draws without which errors are told; digits of their sensitivities, and of errors.
_N_PARTS, _DIGITS, _SHOWN = 8, 9, 3


@dataclass(frozen=True, eq=False)
class PriorSensitivity:
    """What `NGVIApproximation.prior_sensitivity` returns; it prints as a table.

    Parameters
    ----------
    table : pandas.DataFrame
        Columns ``prior`` and ``likelihood``, the sensitivities, with standard errors ``prior_se`` and
        ``likelihood_se``, and ``diagnosis``, in words of ArviZ; a row for each element.
    khat : dict of str to float
        The larger k-hat of both powers, of ``prior`` and ``likelihood``.
    priors : tuple of str
        Variables whose priors were scaled.
    likelihoods : tuple of str
        Variables that were scaled as likelihood.
    tree : xarray.DataTree
        Groups ``posterior``, ``log_prior`` and ``log_likelihood``, the last two with one sum a draw: for
        ``arviz_stats.psense`` and ``arviz_plots.plot_psense_dist``.
    doubts : tuple of str
        What stands against relying on it, in clauses.
    """

    table: pd.DataFrame
    khat: Mapping[str, float]
    priors: tuple[str, ...]
    likelihoods: tuple[str, ...]
    tree: xr.DataTree
    doubts: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """What was scaled, and how far it can be relied on."""
        priors, likelihoods = (", ".join(f"`{name}`" for name in of) for of in (self.priors, self.likelihoods))
        scaled = f"Power scaling of the priors of {priors}, and of the likelihood of {likelihoods}."
        khats = ", ".join(f"{name} {value:.2f}" for name, value in self.khat.items())
        doubts = f"Not reliable: {'; '.join(self.doubts)}." if self.doubts else ""
        return tuple(filter(None, (scaled, f"Pareto k-hat: {khats}.", doubts)))

    def __str__(self) -> str:
        """Return the sentences, and the table."""
        return "\n".join(
            [*self.lines, "", self.table.to_string(header=["prior", "+-", "likelihood", "+-", "diagnosis"])]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return paragraphs(self.lines) + str(self.table.to_html())


def prior_sensitivity(
    posterior: Posterior,
    draws: int,
    rng: np.random.Generator,
    *,
    var_names: Names,
    prior_var_names: Names,
    likelihood_var_names: Names,
    threshold: float,
) -> PriorSensitivity:
    """Return sensitivities by power scaling; see `NGVIApproximation.prior_sensitivity`."""
    posterior.check_weighable(draws, "Power scaling takes")
    if why := posterior.density.why_in_part:
        raise ValueError(f"Power scaling needs the likelihood of all data: {why}. Ask a model of all rows.")
    posterior.refuse_changed_data("Power scaling would be about another posterior")
    priors, likelihoods = _scaled(posterior, prior_var_names, likelihood_var_names)
    theta, doubts = _drawn(posterior, draws, rng)
    of_prior = TermSums(posterior.model, posterior.layout, lambda: log_densities(posterior.model, priors))(theta)
    of_likelihood = _log_likelihood(posterior, theta, likelihoods, is_all=likelihood_var_names is None)
    shown = _shown(posterior, theta, var_names, seed_of(rng))
    tree = xr.DataTree.from_dict(
        {
            "posterior": shown,
            "log_prior": one_chain({"prior": of_prior}),
            "log_likelihood": one_chain({"likelihood": of_likelihood}),
        }
    )
    khat = {"prior": _khat(of_prior), "likelihood": _khat(of_likelihood)}
    limit = khat_limit(draws)
    doubts = (*doubts, *(f"k-hat of {name} is above {limit:.2g}" for name, value in khat.items() if value > limit))
    summary = functools.partial(imported("arviz_stats").psense_summary, alphas=_POWERS)
    table = summary(tree, threshold=threshold)
    # Jackknife: without each of some parts of the draws.
    parts = [tree.isel(draw=np.arange(draws) % _N_PARTS != k) for k in range(_N_PARTS)]
    kinds = ["prior", "likelihood"]
    without = np.array([summary(part, threshold=np.inf, round_to=_DIGITS)[kinds].to_numpy(float) for part in parts])
    errors = np.sqrt(_N_PARTS - 1) * without.std(axis=0)
    for i, kind in enumerate(kinds):
        table.insert(2 * i + 1, f"{kind}_se", errors[:, i].round(_SHOWN))
    return PriorSensitivity(table, khat, tuple(priors), tuple(likelihoods), tree, doubts)


def _scaled(posterior: Posterior, priors: Names, likelihoods: Names) -> tuple[list[str], list[str]]:
    """Return the variables whose priors are scaled, and those of the likelihood."""
    model, free = posterior.model, [v.name for v in posterior.layout.variables]
    potentials = [term.name for term in model.potentials]
    observed = [rv.name for rv in model.observed_RVs]
    why = "which can't be scaled as such"
    asked = None if priors is None else checked_names(priors, [*free, *potentials], why, "prior_var_names")
    of_prior = asked or top_level_priors(model, free)
    if likelihoods is not None:
        return of_prior, checked_names(likelihoods, [*observed, *potentials], why, "likelihood_var_names")
    if not observed:
        raise ValueError(
            "The model has no observed variable: name the Potentials that are its likelihood, likelihood_var_names=..."
            if potentials
            else "The model has no observed variable, and no likelihood to scale."
        )
    return of_prior, observed


def _drawn(posterior: Posterior, draws: int, rng: np.random.Generator) -> tuple[Array, tuple[str, ...]]:
    """Return draws of equal weight, corrected by importance weights where these help."""
    made, doubts = joint_draws(posterior, draws, rng)
    rows = evenly_picked(np.exp(weigh(made.log_weights)[0]), draws, rng.random())
    return made.theta[rng.permutation(rows)], doubts


def _log_likelihood(posterior: Posterior, theta: Array, names: Sequence[str], *, is_all: bool) -> Array:
    """Return the log likelihood of each draw: what log p has beside priors and Potentials, or that of some variables.

    Log p is compiled, knows rows, and reaches data that are elsewhere.
    """
    model, layout = posterior.model, posterior.layout
    if not is_all:
        return TermSums(model, layout, lambda: log_densities(model, names))(theta)
    others = [*(v.name for v in layout.variables), *(term.name for term in model.potentials)]
    of_others = TermSums(model, layout, lambda: log_densities(model, others, jacobian=True))(theta)
    return posterior.density.logp(theta) - of_others


def _shown(posterior: Posterior, theta: Array, var_names: Names, seed: int) -> xr.Dataset:
    """Return the variables in the table, at draws."""
    planned = None
    if var_names is None:
        planned = Planned.of(posterior, group_effects=False)
        names = planned.names
    else:
        known = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
        names = checked_names(var_names, known)
    values = narrow(posterior, Kept(), frozenset(names))(theta, random_seed=seed)
    tree = to_datatree(to_multitrace(posterior.model, values, {}), posterior.model, include_transformed=False)
    made = tree["posterior"].to_dataset()
    shown = made[names] if planned is None else planned.arranged(made)[0]
    return shown[[name for name, of in shown.data_vars.items() if (np.ptp(of.to_numpy(), axis=(0, 1)) > 0.0).any()]]


def _khat(log_density: Array) -> float:
    """Return the larger k-hat of the weights of both powers; -inf where these are equal."""
    return max(pareto_khat((power - 1.0) * log_density, np.zeros_like(log_density)) for power in _POWERS)
