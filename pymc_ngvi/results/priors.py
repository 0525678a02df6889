"""How good the weights of weighted draws are: whether these can be relied on, and what to do where not."""

import dataclasses
import functools
import math
import warnings

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pymc as pm
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.messages import OURS, checked_names, suggestion
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, khat_limit, pareto_khat, weigh
from pymc_ngvi.core.seeds import Seed, generator_of, seed_of
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import TermSums, log_densities
from pymc_ngvi.density.new_priors import NewPriors
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.sampling import picked
from pymc_ngvi.reading.roles import top_level_priors
from pymc_ngvi.results.convert import one_chain, to_datatree, to_multitrace
from pymc_ngvi.results.diagnosis.diagnosis import Kept
from pymc_ngvi.results.distributions import Costs, Distribution, MovePlan, Notes, Posterior
from pymc_ngvi.results.left_out import LogMarginalLikelihood, log_marginal_likelihood
from pymc_ngvi.results.sampling import Names, Sampling, narrow, sample_tree
from pymc_ngvi.results.summary import Planned, Summary, imported, paragraphs, summary_of_draws

#: Effective draws below which the error of a mean, 1 / sqrt(n) of its standard deviation, is above .05.
_FEWEST = 400
#: Draws that are proposed, at most; part of those asked for that come where they can be had.
_MOST_DRAWS, _NEARLY = 14_000, 0.9
#: Nats below the heaviest draw where a log weight has no digits left for what another log p, as low there, makes of it.
_NO_DIGITS = 1e9


@dataclass(frozen=True, eq=False)
class JudgedDraws:
    """What results that are made of weighted draws have in common: how good the weights are, and how they print."""

    posterior: Posterior
    draws: JointDraws
    log_ratio: Array
    seed: int
    #: Pareto k-hat of the weights.
    khat: float
    #: Independent draws that the weighted ones are worth; where hyperparameters repeat, those of these.
    effective_sample_size: float
    #: What stands against relying on it, in clauses.
    doubts: tuple[str, ...]
    #: What to do where there are doubts.
    cure: str
    #: Whether k-hat speaks for the weights.
    weights_help: bool

    @classmethod
    def of(
        cls, posterior: Posterior, made: JointDraws, log_ratio: Array, rng: np.random.Generator, n_wanted: int,
        doubts: tuple[str, ...], fit: str, **more: Any,
    ) -> Self:  # fmt: skip
        """Judge draws with new weights; warn where they can't be relied on."""
        log_weights = made.log_weights + log_ratio
        # Weights of equal globals stand or fall together.
        found = [weigh(of)[1] for of in (log_weights, made.by_globals(log_weights))]
        judged = [of for of in found if of.n_draws >= MIN_KHAT_DRAWS]
        worst = max(judged, key=lambda of: (not of.verdict().helps, of.khat))
        helps, size, cure = worst.verdict().helps, _effective(made, log_weights), fit
        if not helps:
            limit = khat_limit(worst.n_draws)
            doubts = (f"Pareto k-hat is {worst.khat:.2f}, above {limit:.2g}, so that few draws decide", *doubts)
        elif size < _FEWEST:
            error = 1.0 / math.sqrt(max(size, 1.0))
            said = f"draws are worth {size:,.0f} independent ones: the error of a mean is {error:.2g} of its sd"
            doubts = (f"{len(log_weights):,} {said}", *doubts)
            needed = math.ceil(1.2 * _FEWEST / size * n_wanted / 1_000) * 1_000
            can_be_had = _effective(made, made.log_weights) > _NEARLY * n_wanted
            cure = f"Take more draws, draws={needed:_}; or f{fit[1:]}" if can_be_had and needed <= _MOST_DRAWS else fit
        seed = int(rng.integers(2**62))
        result = cls(posterior, made, log_ratio, seed, worst.khat, size, doubts, cure, helps, **more)
        if doubts:
            warnings.warn(result.sentence, UserWarning, skip_file_prefixes=OURS)
        return result

    @property
    def is_reliable(self) -> bool:
        """Whether nothing stands against relying on it; where something does, a new fit is due."""
        return not self.doubts

    @property
    def n_draws(self) -> int:
        """Weighted draws."""
        return len(self.log_ratio)

    @property
    def _what(self) -> str:
        raise NotImplementedError

    @property
    def sentence(self) -> str:
        """Whether it can be relied on, and what to do where not."""
        if self.doubts:
            return f"Posterior with {self._what}: not reliable: {'; '.join(self.doubts)}. {self.cure}"
        return (
            f"Posterior with {self._what}: reliable. {self.n_draws:,} weighted draws have a Pareto k-hat of "
            f"{self.khat:.2f}, and are worth {self.effective_sample_size:,.0f}."
        )

    def __repr__(self) -> str:
        """Return what it is, in short."""
        return (
            f"{type(self).__name__}({self._what}: k-hat {self.khat:.2f}, effective sample size "
            f"{self.effective_sample_size:,.0f}, {'reliable' if self.is_reliable else 'not reliable'})"
        )

    def _generator(self, random_seed: Seed) -> np.random.Generator:
        return generator_of(self.seed if random_seed is None else random_seed)

    def summary(self) -> Summary:
        """Return a table of the variables."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the summary."""
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


def _effective(draws: JointDraws, log_weights: Array) -> float:
    """Return how many independent draws weighted ones are worth; where globals repeat, how many of these."""
    return min(draws.worth * effective_size(log_weights), effective_size(draws.by_globals(log_weights)))


def log_mean(draws: JointDraws, log_ratio: Array) -> tuple[float, float]:
    """Return the logarithm of a weighted mean of exponentials, and its standard error, from independent parts."""
    _, number = np.unique(draws.part, return_inverse=True)
    sums, logs = [], []
    for log_weights in (draws.log_weights, draws.log_weights + log_ratio):
        top = float(log_weights.max())
        of_part = np.bincount(number, np.exp(log_weights - top))
        sums.append(of_part / of_part.sum())
        logs.append(np.log(of_part.sum()) + top)
    before, after = sums
    k = len(before)
    error = np.sqrt(np.sum((after - before) ** 2) * k / (k - 1)) if k > 1 else np.inf
    return float(logs[1] - logs[0]), float(error)


def joint_draws(posterior: Posterior, n: int, rng: np.random.Generator) -> tuple[JointDraws, tuple[str, ...]]:
    """Return draws with their weights, and what stands against relying on them, in clauses.

    An exact, nested or moved posterior has weights. Draws of another q get their importance weights where these help;
    where they can't, the draws are those of q.
    """
    q, density, record = posterior.distribution, posterior.density, posterior.record
    made = q.joint(n, rng)
    if q.kept_log_weights() is not None:
        log_weights = made.log_weights
        log_weights = np.where(log_weights > log_weights.max() - _NO_DIGITS, log_weights, -np.inf)
        return made._replace(log_weights=log_weights), () if record is None else record.doubts
    if density.why_in_part:
        return made, (
            f"the draws are those of {posterior.kind}, which is not compared with log p: {density.why_in_part}",
        )
    log_weights, found = weigh(q.log_weights(made.theta, density))
    if found.verdict().helps:
        return made._replace(log_weights=log_weights), ()
    return made, (
        f"the draws are those of {posterior.kind} as it is: Pareto k-hat {found.khat_text()} says that importance "
        "weights can't correct it",
    )


@dataclass(frozen=True, eq=False)
class WeightedDistribution(Distribution):
    """Weighted draws as a distribution that can be drawn from."""

    #: shape (n, n_dim).
    theta: Array
    #: Log weights, not smoothed; shape (n,).
    log_ratio: Array
    #: The coordinate by which draws are picked evenly.
    in_order_of: int
    #: Attributes of trees of draws.
    of_draws: Mapping[str, float]

    @functools.cached_property
    def _weights(self) -> Array:
        return np.exp(weigh(self.log_ratio)[0])

    @property
    def name(self) -> str:
        """Its name, for titles and errors."""
        return f"reweighted {self.q.name}"

    @property
    def family(self) -> str:
        """The name of its family."""
        return self.q.family

    def rows(self, n: int, rng: np.random.Generator) -> NDArray[np.intp]:
        """Return rows of equal weight, evenly by weight: as few repetitions as can be."""
        order = np.argsort(self.theta[:, self.in_order_of], kind="stable")
        return order[picked(self._weights[order], rng.permutation((np.arange(n) + rng.random()) / n))]

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of equal weight."""
        return self.theta[self.rows(n, rng)]

    base = draw_matched = draw

    def log_density(self, theta: Array) -> None:
        """Return None: it is not known."""

    def effective(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        return min(float(n), self.of_draws["effective_sample_size"])

    def mean(self) -> Array:
        """Return the mean."""
        return self._weights @ self.theta

    def sd(self) -> Array:
        """Return the standard deviations."""
        return np.sqrt(self._weights @ (self.theta - self.mean()) ** 2)

    def cov(self) -> Array:
        """Return the covariance."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        apart = self.theta[:, index] - self.mean()[index]
        return apart.T @ (self._weights[:, None] * apart)

    def kept_log_weights(self) -> Array:
        """Return the log weights."""
        return self.log_ratio

    def notes(self, theta: Array, rng: np.random.Generator, log_q: bool) -> Notes:
        """Return what there is to say of draws, and how many of them are different."""
        return {}, {**self.of_draws, "distinct_global_draws": len(np.unique(theta[:, self.in_order_of]))}

    def plan(self, density: ModelDensity) -> MovePlan:
        """Return how draws are moved: as those of what they are of."""
        return self.q.plan(density)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return what evaluations cost."""
        return self.q.costs(density, record)


_FIT = (
    'Fit the model with these priors: pm.fit(method="ngvi", model=found.model), where `found` is what with_prior '
    "returned."
)


@dataclass(frozen=True, eq=False, repr=False)
class Reweighted(JudgedDraws):
    """The posterior under other priors: what `NGVIApproximation.with_prior` returns. It prints as a summary.

    Parameters
    ----------
    posterior : Posterior
        That was fitted.
    draws : JointDraws
        With the weights that they have under the old priors.
    log_ratio : ndarray, shape (n_draws,)
        Log p under the new priors minus that under the old ones.
    seed : int
        Of draws, where none is given.
    khat, effective_sample_size, doubts, cure, weights_help
        How good the weights are.
    priors : NewPriors
    """

    priors: NewPriors

    @property
    def model(self) -> pm.Model:
        """A copy of the model with the new priors and the data of the fit.

        Raises
        ------
        ValueError
            Where the data are in shards or batches: the model has some of them only.
        """
        if self.posterior.density.is_sharded or self.posterior.density.is_streamed:
            raise ValueError(f"The data are not all in one model. {_elsewhere(self.posterior)}")
        with self.posterior.with_data_of_fit():
            return self.priors.changed_model

    @property
    def _what(self) -> str:
        return f"other priors of {', '.join(f'`{name}`' for name in self.priors.names)}"

    # --- draws ---

    @functools.cached_property
    def _weighted(self) -> Posterior:
        """The posterior with the new weights; its density is that of the old priors, and is not asked for."""
        in_order_of = next(v.where.start for v in self.posterior.layout.variables if v.name == self.priors.names[0])
        attrs = {"khat": self.khat, "effective_sample_size": self.effective_sample_size}
        q = WeightedDistribution(
            self.posterior.distribution, self.draws.theta, self.draws.log_weights + self.log_ratio, in_order_of, attrs
        )
        return dataclasses.replace(self.posterior, distribution=q, record=None)

    def sample(self, draws: int = 2_000, *, var_names: Names = None, random_seed: Seed = None) -> xr.DataTree:
        """Draw from the posterior under the new priors: draws of equal weight, picked by the weights.

        Parameters
        ----------
        draws : int, default 2_000
        var_names : str or sequence of str, optional
            Default: free variables and Deterministics.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: the same draws in each call.

        Returns
        -------
        xarray.DataTree
            As that of `NGVIApproximation.sample`. Attributes of ``posterior`` are ``khat`` and
            ``effective_sample_size``.
        """
        with self.posterior.with_data_of_fit():
            return sample_tree(
                self._weighted, Kept(), check_draws(draws), self._generator(random_seed), Sampling(var_names=var_names)
            )

    def summary(
        self, draws: int = 4_000, *, group_effects: bool = False, random_seed: Seed = None, **kwargs: Any
    ) -> Summary:
        """Return a table of the variables under the new priors, and whether it can be relied on.

        Parameters
        ----------
        draws, group_effects, random_seed, **kwargs
            As those of `NGVIApproximation.summary`.

        Returns
        -------
        Summary
        """
        with self.posterior.with_data_of_fit():
            made = summary_of_draws(
                self._weighted, Kept(), check_draws(draws), self._generator(random_seed), group_effects, kwargs
            )
        return dataclasses.replace(made, lines=(self.sentence,), khat=self.khat)

    # --- marginal likelihood ---

    @functools.cached_property
    def log_bayes_factor(self) -> LogMarginalLikelihood:
        """Log p(y) under the new priors minus that under the old ones, with its standard error.

        Raises
        ------
        ValueError
            Where the weights can't be relied on, or a prior is improper.
        """
        if reasons := self.priors.improper:
            raise ValueError(f"There is no marginal likelihood: {'; '.join(reasons)}.")
        if not self.weights_help:
            raise ValueError(f"There is no marginal likelihood to be relied on. {self.sentence}")
        return LogMarginalLikelihood(*log_mean(self.draws, self.log_ratio))

    @functools.cached_property
    def log_marginal_likelihood(self) -> LogMarginalLikelihood:
        """Log p(y) under the new priors, with its standard error.

        Raises
        ------
        ValueError
            Where the fit has none (`NGVIApproximation.log_marginal_likelihood`); where the weights can't be relied on,
            or a prior is improper.
        """
        change = self.log_bayes_factor
        with self.posterior.with_data_of_fit():
            old = log_marginal_likelihood(self.posterior)
        return LogMarginalLikelihood(old.value + change.value, float(np.hypot(old.se, change.se)))


def reweighted(posterior: Posterior, priors: Mapping[str, Any], draws: int, rng: np.random.Generator) -> Reweighted:
    """Return the posterior under other priors; see `NGVIApproximation.with_prior`."""
    posterior.check_weighable(draws)
    new = NewPriors.of(posterior.model, posterior.layout, priors)
    with posterior.with_data_of_fit():
        made, doubts = joint_draws(posterior, draws, rng)
        log_ratio = new.log_ratio(made.theta)
    log_ratio[np.isnan(log_ratio)] = -np.inf  # at draws that could not be made
    if not np.isfinite(made.log_weights + log_ratio).any():
        raise ValueError(f"The new prior of {' or '.join(new.names)} is 0 at all draws of the posterior: fit again.")
    fit = _elsewhere(posterior) or _FIT
    return Reweighted.of(posterior, made, log_ratio, rng, draws, doubts, fit, priors=new)


def _elsewhere(posterior: Posterior) -> str:
    """Return what to do where the data are not all in one model; empty where they are."""
    if posterior.density.is_sharded:
        return "Fit shards that are built with these priors."
    return "Fit the stream with a model that has these priors." if posterior.density.is_streamed else ""


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
    table = imported("arviz_stats").psense_summary(tree, threshold=threshold, alphas=_POWERS)
    return PriorSensitivity(table, khat, tuple(priors), tuple(likelihoods), tree, doubts)


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
        names = planned.names
    else:
        known = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
        names = checked_names(var_names, known)
    values = narrow(posterior, Kept(), frozenset(names))(theta, random_seed=seed)
    trace = to_multitrace(posterior.model, values, {}, 1)
    made = to_datatree(trace, posterior.model, include_transformed=False)["posterior"].to_dataset()
    shown = made[names] if planned is None else planned.arranged(made)[0]
    return shown[[name for name, of in shown.data_vars.items() if (np.ptp(of.to_numpy(), axis=(0, 1)) > 0.0).any()]]


def _khat(log_density: Array) -> float:
    """Return the larger k-hat of the weights of both powers; -inf where these are equal."""
    zero = np.zeros(len(log_density))
    return max(pareto_khat((power - 1.0) * log_density, zero) for power in _POWERS)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
