"""The posterior given new rows as well, from draws of the one that was fitted, by importance weights."""

import contextlib
import functools
import warnings

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.messages import OURS, suggestion
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, weigh
from pymc_ngvi.core.seeds import Seed, generator_of
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.new_rows import (
    CoupledRows,
    WithNewRows,
    draws_without_rows,
    skewness_of,
    with_new_rows,
    with_trees,
)
from pymc_ngvi.marginal.sampling import picked
from pymc_ngvi.results.marginal_likelihood import LogMarginalLikelihood
from pymc_ngvi.results.new_rows.elements import rows_on_new, with_new_elements
from pymc_ngvi.results.new_rows.given import NewRows
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.predictions.new_data import Given
from pymc_ngvi.results.predictions.predict import tree_of
from pymc_ngvi.results.priors.judged import Judged, JudgedDraws, log_mean
from pymc_ngvi.results.priors.weighted import joint_draws
from pymc_ngvi.results.sampling import Names
from pymc_ngvi.results.summary.summary import Planned, Summary, imported

#: Standard deviations that a conditional mean may move by: farther out, only moments are known of it; and less where
#: these are skewed by more than this.
_FARTHEST, _FARTHEST_SKEWED, _SKEWED = 2.0, 0.25, 0.8
#: Draws for each that was asked for, at most, where new elements are drawn for each of them.
_MANY = 2
#: Variance, from which on that of the log weights is too much of the noise of new elements.
_NOISE = 0.25
_FIT = "Fit again with all of the rows."


@dataclass(frozen=True, eq=False)
class Updated(JudgedDraws):
    """The posterior given new rows as well: what `NGVIApproximation.update` returns. It prints as a summary.

    Parameters
    ----------
    posterior : Posterior
        That was fitted.
    rows : NewRows
    draws : JointDraws
        With the weights that they have without the new rows.
    values : mapping of str to ndarray
        Free variables at these draws, (n, *shape), with elements that were not in the fit.
    log_ratio : ndarray, shape (n,)
        Log density of the new rows at each draw; of groups, given the global parameters.
    judged : Judged
        How good the weights are.
    seed : int
        Of draws, where none is given.
    """

    posterior: Posterior
    rows: NewRows
    draws: JointDraws
    values: Mapping[str, AnyArray]
    log_ratio: Array
    judged: Judged
    seed: int

    @property
    def n_rows(self) -> int:
        """Number of new observations."""
        return self.rows.n_rows

    @property
    def sentence(self) -> str:
        """Whether it can be relied on, and what to do where not."""
        n = self.n_rows
        return self.judged.sentence(f"Posterior with {n:,} new row{'s' if n > 1 else ''}")

    def __repr__(self) -> str:
        """Return what it is, in short."""
        return (
            f"Updated({self.n_rows:,} new rows: k-hat {self.khat:.2f}, effective sample size "
            f"{self.effective_sample_size:,.0f}, {'reliable' if self.is_reliable else 'not reliable'})"
        )

    @functools.cached_property
    def log_predictive_density(self) -> LogMarginalLikelihood:
        """Log density of the new rows given those of the fit, in nats, with its standard error.

        Raises
        ------
        ValueError
            Where the weights can't be relied on.
        """
        if not self.judged.weights_help:
            raise ValueError(f"There is no density to be relied on. {self.sentence}")
        return LogMarginalLikelihood(*log_mean(self.draws, self.log_ratio))

    # --- draws ---

    @functools.cached_property
    def _weights(self) -> Array:
        """Smoothed weights."""
        log_weights = weigh(self.draws.log_weights + self.log_ratio, np.zeros(len(self.log_ratio)))[0]
        return np.exp(log_weights)

    def sample(self, draws: int = 2_000, *, var_names: Names = None, random_seed: Seed = None) -> xr.DataTree:
        """Draw from the posterior given the new rows as well: draws of equal weight, picked by the weights.

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
            ``posterior`` has the labels of new levels, too; Deterministics of rows are those of the new rows. Its
            attributes are ``khat`` and ``effective_sample_size``.

        Raises
        ------
        ValueError
            For variables that the model does not have.
        """
        rng = generator_of(self.seed if random_seed is None else random_seed)
        order = np.argsort(self.draws.theta[:, 0], kind="stable")
        uniform = rng.permutation((np.arange(check_draws(draws)) + rng.random()) / draws)
        at = order[picked(self._weights[order], uniform)]
        free = {name: of[at] for name, of in self.values.items()}
        computed = self.rows.deterministics
        names = self._wanted(var_names, [*free, *computed])
        shown = {name: free[name] for name in names if name in free}
        if made := [name for name in names if name not in free]:
            with self.posterior.with_data_of_fit():
                shown |= self.rows.values(made, free)
        attrs: dict[str, Any] = {"khat": self.khat, "effective_sample_size": self.effective_sample_size}
        tree = tree_of(self.rows.new, shown, self.rows.data, attrs)
        groups = {"posterior": "predictions", "constant_data": "predictions_constant_data"}
        return xr.DataTree.from_dict({to: tree[name].to_dataset() for to, name in groups.items() if name in tree})

    def _wanted(self, var_names: Names, valid: list[str]) -> list[str]:
        if var_names is None:
            return valid
        names = [var_names] if isinstance(var_names, str) else list(dict.fromkeys(var_names))
        if unknown := [name for name in names if name not in valid]:
            raise ValueError(f"var_names has {unknown[0]!r}, which can't be had: {suggestion(unknown[0], valid)}")
        if not names:
            raise ValueError("var_names is empty: name at least one variable, or leave it out for all of them.")
        return names

    def summary(
        self, draws: int = 4_000, *, group_effects: bool = False, random_seed: Seed = None, **kwargs: Any
    ) -> Summary:
        """Return a table of the variables given the new rows as well, and whether it can be relied on.

        Parameters
        ----------
        draws, group_effects, random_seed, **kwargs
            As those of `NGVIApproximation.summary`.

        Returns
        -------
        Summary
        """
        with self.posterior.with_data_of_fit():
            planned = Planned.of(self.posterior, group_effects=group_effects).plan.names
        valid = [*self.values, *self.rows.deterministics]
        chosen = [name for name in valid if name in planned]
        made = self.sample(draws, var_names=kwargs.pop("var_names", None) or chosen, random_seed=random_seed)
        table = imported("arviz_stats").summary(made, **{"kind": "stats", **kwargs})
        return Summary((self.sentence,), table, self.khat, {"": table}, (), "round_to" not in kwargs)


def updated(posterior: Posterior, new_data: Given, draws: int, rng: np.random.Generator) -> Updated:
    """Return the posterior given new rows as well; see `NGVIApproximation.update`."""
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    if check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"Weights take at least {MIN_KHAT_DRAWS} draws; got {draws}.")
    with posterior.with_data_of_fit():
        rows = NewRows(posterior, new_data)
        made, doubts = _draws(posterior, draws, rng)
        made = _fewer(made, _MANY * draws) if rows.grown else made
        rows.look_at(made.theta[made.log_weights.argmax()])
        given = _with_rows(posterior, rows, made, rng)
    if not np.isfinite(made.log_weights + given.log_ratio).any():
        raise ValueError(f"The new rows are impossible at all draws of the posterior. {_FIT}")
    judged = Judged.of(made, given.log_ratio, (*given.doubts, *doubts), draws, _FIT)
    made = made._replace(theta=given.theta)
    result = Updated(posterior, rows, made, given.values, given.log_ratio, judged, int(rng.integers(2**62)))
    if result.doubts:
        warnings.warn(result.sentence, UserWarning, skip_file_prefixes=OURS)
    return result


class _DrawsGiven(NamedTuple):
    """Draws given new rows: what these say of each, where it is then, and what is not known well."""

    log_ratio: Array
    theta: Array
    values: dict[str, AnyArray]
    doubts: tuple[str, ...]


def _with_rows(posterior: Posterior, rows: NewRows, made: JointDraws, rng: np.random.Generator) -> _DrawsGiven:
    """Return draws of the posterior, and of elements that were not in the fit, given the new rows."""
    depends, numbers = rows_on_new(rows) if rows.grown else (None, {})
    of_known = np.arange(rows.n_rows) if depends is None else np.flatnonzero(np.diff(depends.indptr) == 0)
    known = _with_known_rows(posterior, rows, of_known, made.theta)
    log_ratio, free, doubts = known.log_ratio, rows.free(known.theta), list[str]()
    if (moved := _mean(known.moved, made.log_weights + log_ratio)) > _FARTHEST:
        doubts.append(f"the conditional mean of a group moves by {moved:.1f} of its standard deviations")
    elif moved > _FARTHEST_SKEWED and known.skewness > _SKEWED:
        doubts.append("the conditional distribution of a group with new rows is skewed, and known by its moments only")
    drawn: dict[str, AnyArray] = {}
    if depends is not None:
        elements = with_new_elements(rows, free, made.log_weights + log_ratio, depends, numbers, rng)
        log_ratio, drawn = log_ratio + elements.log_ratio, elements.drawn
        if elements.variance > _NOISE:
            doubts.append("the densities of rows of new levels are known from few candidates")
    log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
    return _DrawsGiven(log_ratio, known.theta, free | rows.known(free, drawn), tuple(doubts))


def _with_known_rows(posterior: Posterior, rows: NewRows, which: NDArray[np.intp], theta: Array) -> WithNewRows:
    """Return draws given the rows that depend on nothing new."""

    def logp(theta: Array) -> Array:
        free = rows.free(theta)
        return rows.logp(rows.known(free, rows.some))[:, which]

    zero = np.zeros(len(theta))
    if not len(which):
        return WithNewRows(zero, theta, zero)
    state = with_trees(getattr(posterior.distribution, "q", None))
    if state is not None:
        with contextlib.suppress(CoupledRows):  # weights may do
            return with_new_rows(theta, state, logp)
    return WithNewRows(logp(theta).sum(axis=1), theta, zero)


def _mean(values: Array, log_weights: Array) -> float:
    """Return a weighted mean."""
    known = np.isfinite(log_weights)
    weights = np.exp(log_weights[known] - log_weights[known].max(initial=-np.inf))
    return float(weights @ values[known] / weights.sum()) if known.any() else 0.0


def _draws(posterior: Posterior, draws: int, rng: np.random.Generator) -> tuple[JointDraws, tuple[str, ...]]:
    """Return draws of the posterior, and what stands against relying on them."""
    state, has_rows = with_trees(getattr(posterior.distribution, "q", None)), not posterior.changed_data()
    if state is not None:
        doubts = () if posterior.record is None else posterior.record.doubts
        if skewness_of(state) < _SKEWED:
            return draws_without_rows(state, draws, rng), doubts
        if has_rows:
            return posterior.distribution.joint(draws, rng), doubts
        said = "conditional distributions of groups are skewed, and without the rows of the fit known by moments only"
        return draws_without_rows(state, draws, rng), (*doubts, said)
    if not has_rows and posterior.distribution.kept_log_weights() is None:
        said = f"the draws are those of {posterior.kind}, which is not compared with log p: its data are not there"
        return posterior.distribution.joint(draws, rng), (said,)
    return joint_draws(posterior, draws, rng)


def _fewer(made: JointDraws, n: int) -> JointDraws:
    """Return about as many of the draws as are wanted, evenly."""
    step = len(made.theta) // n
    if step < 2:
        return made
    theta, log_weights = made.theta[::step], made.log_weights[::step]
    return JointDraws(theta, log_weights, made.of_globals[::step], made.part[::step], min(1.0, step * made.worth))
