"""Power scaling of priors and likelihoods: how much of a posterior comes from each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, khat_limit, pareto_khat
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.constrain import TermSums, log_densities
from pymc_ngvi.reading.lineage import top_level_priors
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.priors.weighted import WeightedDistribution, joint_draws
from pymc_ngvi.results.sampling import Names, narrow
from pymc_ngvi.results.summary.summary import Planned, imported, paragraphs

#: Powers between which sensitivity is measured: those of ArviZ, and of the R package priorsense.
_POWERS = (0.99, 1.01)


@dataclass(frozen=True, eq=False)
class PriorSensitivity:
    """What `NGVIApproximation.prior_sensitivity` returns; it prints as a table.

    Parameters
    ----------
    table : pandas.DataFrame
        Columns ``prior`` and ``likelihood``, the sensitivities, and ``diagnosis``, in words of ArviZ; a row for each
        element.
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
        scaled = f"Power scaling of the priors of {_listed(self.priors)}, and of the likelihood of "
        khats = ", ".join(f"{name} {value:.2f}" for name, value in self.khat.items())
        doubts = f"Not reliable: {'; '.join(self.doubts)}." if self.doubts else ""
        return tuple(filter(None, (f"{scaled}{_listed(self.likelihoods)}.", f"Pareto k-hat: {khats}.", doubts)))

    def __str__(self) -> str:
        """Return the sentences, and the table."""
        return "\n".join([*self.lines, "", self.table.to_string()])

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
    if check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"Power scaling takes at least {MIN_KHAT_DRAWS} draws; got {draws}.")
    _check(posterior)
    priors, likelihoods = _scaled(posterior, prior_var_names, likelihood_var_names)
    theta, doubts = _drawn(posterior, draws, rng)
    of_prior = TermSums(posterior.model, posterior.layout, lambda: log_densities(posterior.model, priors))(theta)
    of_likelihood = _log_likelihood(posterior, theta, likelihoods, is_all=likelihood_var_names is None)
    shown = _shown(posterior, theta, var_names, int(rng.integers(2**31)))
    tree = xr.DataTree.from_dict(
        {
            "posterior": shown,
            "log_prior": _one_number("prior", of_prior),
            "log_likelihood": _one_number("likelihood", of_likelihood),
        }
    )
    khat = {"prior": _khat(of_prior), "likelihood": _khat(of_likelihood)}
    limit = khat_limit(draws)
    doubts = (*doubts, *(f"k-hat of {name} is above {limit:.2g}" for name, value in khat.items() if value > limit))
    table = imported("arviz_stats").psense_summary(tree, threshold=threshold, alphas=_POWERS)
    return PriorSensitivity(table, khat, tuple(priors), tuple(likelihoods), tree, doubts)


def _check(posterior: Posterior) -> None:
    """Raise where there is no likelihood to evaluate, or not the one of the fit."""
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    if why := posterior.density.why_in_part:
        raise ValueError(f"Power scaling needs the likelihood of all data: {why}. Ask a model of all rows.")
    posterior.refuse_changed_data("Power scaling would be about another posterior")


def _scaled(posterior: Posterior, priors: Names, likelihoods: Names) -> tuple[list[str], list[str]]:
    """Return the variables whose priors are scaled, and those of the likelihood."""
    model, free = posterior.model, [v.name for v in posterior.layout.variables]
    potentials = [term.name for term in model.potentials]
    observed = [rv.name for rv in model.observed_RVs]
    of_prior = top_level_priors(model, free) if priors is None else _named("prior_var_names", priors, free, potentials)
    if likelihoods is not None:
        return of_prior, _named("likelihood_var_names", likelihoods, observed, potentials)
    if not observed:
        raise ValueError(
            "The model has no observed variable: name the Potentials that are its likelihood, likelihood_var_names=..."
            if potentials
            else "The model has no observed variable, and no likelihood to scale."
        )
    return of_prior, observed


def _named(option: str, names: str | Sequence[str], *valid: Sequence[str]) -> list[str]:
    known = [name for some in valid for name in some]
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise ValueError(f"{option} is empty. {suggestion('', known)}")
    for name in wanted:
        if name not in known:
            raise ValueError(f"{option} has {name!r}, which can't be scaled as such: {suggestion(name, known)}")
    return wanted


def _drawn(posterior: Posterior, draws: int, rng: np.random.Generator) -> tuple[Array, tuple[str, ...]]:
    """Return draws of equal weight, corrected by importance weights where these help."""
    if posterior.distribution.kept_log_weights() is not None:
        return posterior.draw(draws, rng), () if posterior.record is None else posterior.record.doubts
    made, doubts = joint_draws(posterior, draws, rng)
    if not made.log_weights.any():
        return made.theta, doubts
    q = WeightedDistribution(posterior.distribution, made.theta, made.log_weights, 0, {})
    return q.draw(draws, rng), doubts


def _log_likelihood(posterior: Posterior, theta: Array, names: Sequence[str], *, is_all: bool) -> Array:
    """Return the log likelihood of each draw: what log p has beside priors and Potentials, or that of some variables.

    Log p is compiled, knows rows, and reaches data that are elsewhere.
    """
    model, layout = posterior.model, posterior.layout
    if not is_all:
        return TermSums(model, layout, lambda: log_densities(model, names))(theta)
    others = [*(v.name for v in layout.variables), *(term.name for term in model.potentials)]
    rest = TermSums(model, layout, lambda: log_densities(model, others, jacobian=True))
    return posterior.density.logp(theta) - rest(theta)


def _shown(posterior: Posterior, theta: Array, var_names: Names, seed: int) -> xr.Dataset:
    """Return the variables in the table, at draws."""
    planned = None
    if var_names is None:
        planned = Planned.of(posterior, group_effects=False)
        names = planned.plan.names
    else:
        names = [var_names] if isinstance(var_names, str) else list(var_names)
        known = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
        for name in names:
            if name not in known:
                raise ValueError(f"var_names has {name!r}, which the model has not: {suggestion(name, known)}")
    values = narrow(posterior, Kept(), frozenset(names))(theta, random_seed=seed)
    trace = to_multitrace(posterior.model, values, {}, 1)
    made = to_datatree(trace, posterior.model, include_transformed=False)["posterior"].to_dataset()
    shown = made[names] if planned is None else planned.arranged(made)[0]
    return shown[[name for name, of in shown.data_vars.items() if (np.ptp(of.to_numpy(), axis=(0, 1)) > 0.0).any()]]


def _one_number(name: str, values: Array) -> xr.Dataset:
    coords = {"chain": [0], "draw": np.arange(len(values))}
    return xr.Dataset({name: (("chain", "draw"), values[None])}, coords=coords)


def _khat(log_density: Array) -> float:
    """Return the larger k-hat of the weights of both powers; -inf where these are equal."""
    zero = np.zeros(len(log_density))
    return max(pareto_khat((power - 1.0) * log_density, zero) for power in _POWERS)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
