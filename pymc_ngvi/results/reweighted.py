"""The posterior with another log p, from its draws by weights: corrected, under other priors, or given new rows."""

import contextlib
import copy
import functools
import math

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pymc as pm

from scipy import sparse
from scipy.sparse import csgraph
from scipy.special import softmax

from pymc_ngvi.core.importance import Estimate, Weights, khat_limit, log_mean, weigh
from pymc_ngvi.core.messages import listed, shortened, warn
from pymc_ngvi.core.prices import rounded_up
from pymc_ngvi.core.sizes import ENOUGH, FIXED_SEED, HELD, MOST_NUMBERS, N_SHOWN, seed_of
from pymc_ngvi.core.types import AnyArray, Array, Bools, Indices
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer, OnDraws, unconstrained
from pymc_ngvi.density.info import quoted, with_data_for
from pymc_ngvi.density.new_priors import NewPriors
from pymc_ngvi.density.predictive import Treatment, data_behind, indexed_axes, n_batch_axes
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.marginal.left_out import (
    CoupledRows,
    WithNewRows,
    beside,
    draws_without_rows,
    integrated_again,
    with_trees,
)
from pymc_ngvi.marginal.pooled import Draws, Pool, PoolState, WeightChecks, WeightedDraws, evenly_picked
from pymc_ngvi.marginal.proposals import LEAST_DF, StudentMixture
from pymc_ngvi.results.distributions import LogMarginalLikelihood, Posterior
from pymc_ngvi.results.predictions import (
    Given,
    NewData,
    Treatments,
    checked_dict,
    given_new_data,
    places_among,
    rows_of_bambi,
)

#: Part of the draws that weights are worth which leave nothing to correct, whatever the shape of their tail.
_NOTHING_TO_CORRECT = 0.99
#: More draws than these are not proposed to anybody; nor more than so many, where each has to be weighted.
_MOST_DRAWS, _MOST_WEIGHTED = 1_000_000, 14_000
#: Part of the draws asked for that come where they can be had.
_NEARLY = 0.9
#: Nats below the heaviest draw where a log weight has no digits left for what another log p, as low there, makes of it.
_NO_DIGITS = 1e9
_RICHER = "Fit a richer family (family='mixture', 'student_t'), reparametrise, or use pm.sample."


class Weighted(NamedTuple):
    """A posterior that is weighted draws of another one."""

    density: ModelDensity
    state: WeightedDraws
    #: Log p over that of the other one at each draw, up to a constant; shape (n_draws,).
    log_ratio: Array
    #: Of the marginal likelihoods.
    change: Callable[[], Estimate]
    #: Why marginal likelihoods can't be compared, in clauses.
    improper: Sequence[str] = ()

    def log_density(self, what: str) -> LogMarginalLikelihood:
        """Return the change of log p(y), with its error; raise ValueError where it is none, or not to be relied on."""
        if self.improper:
            raise ValueError(f"There is no {what}: {'; '.join(self.improper)}.")
        if not self.state.checks.weights_help:
            raise ValueError(f"The {what} can't be relied on. {self.state.checks}")
        return LogMarginalLikelihood(*self.change()[:2])


def weighted(
    posterior: Posterior, made: Draws, log_ratio: Array, what: str, doubts: Sequence[str], cure: str,
    density: ModelDensity, n_wanted: int, theta: Array | None = None,
) -> Weighted:  # fmt: skip
    """Return the posterior that draws have with other weights; warn where they can't be relied on.

    ``theta`` are the draws in the coordinates of ``density``, where these are others.
    """
    q, new = posterior.distribution, made.reweighted(log_ratio)
    change = log_mean(log_ratio, made.log_weights, part=made.part)
    before = q.q if isinstance(q.q, PoolState) else None
    checks = WeightChecks.of(new, what, tuple(doubts), "", is_of_exact=before is not None and before.checks.is_exact)
    if checks.shortfalls:
        can_be_had = made.effective_size > _NEARLY * n_wanted
        needed = int(rounded_up(1.2 * ENOUGH / max(checks.effective_size, 1.0) * n_wanted))
        if checks.weights_help and can_be_had and needed <= _MOST_WEIGHTED:
            cure = f"Take more draws, draws={needed:_}; or {cure[0].lower()}{cure[1:]}"
        checks = replace(checks, cure=cure)
    if not checks.is_reliable:
        warn(str(checks))
    mass = change if checks.weights_help and before is not None else Estimate(math.nan, math.nan)
    plan = q.plan(posterior.density)
    is_as_before = theta is None and plan.transform is None
    whole = new if theta is None else new._replace(theta=theta)
    whole = whole.reweighted(np.where(np.isfinite(whole.theta).all(axis=1), 0.0, -np.inf))
    gaussian, others = (plan.gaussian, getattr(q.q, "others", ())) if is_as_before else (None, ())
    return Weighted(density, _state(checks, mass, whole, gaussian, others, before), log_ratio, lambda: change)


def _state(
    checks: WeightChecks,
    mass: Estimate,
    draws: Draws,
    gaussian: Any = None,
    others: tuple[Any, ...] = (),
    before: PoolState | None = None,
) -> WeightedDraws:
    """Return weighted draws as a posterior; reports begin from a Gaussian, by default that of their moments."""
    counts = draws.counts
    log_weights = draws.log_weights[counts]
    pool = Pool(draws.theta[counts], log_weights, np.zeros(len(log_weights)), draws.part[counts])
    weights = pool.weights()[0]
    mean = weights @ pool.g
    if gaussian is None:
        gaussian = DiagonalState.from_scale(mean, np.sqrt(weights @ (pool.g - mean) ** 2))
    return WeightedDraws(pool, checks, mass, gaussian, others, before)


def corrected(posterior: Posterior, draws: int, rng: np.random.Generator) -> Weighted:
    """Return draws of q with their importance weights; raise ValueError where these can't correct it."""
    if posterior.distribution.kept_log_weights() is not None:
        raise ValueError(
            "There is nothing for corrected() to correct: this posterior is a pool of draws with weights of its own."
            + posterior.of_exact("The Gaussian fit that it began from is approx.gaussian.")
        )
    posterior.check_weights()
    posterior.check_weighable(draws, "Importance weights take")
    if (most := MOST_NUMBERS // posterior.layout.n_dim) < draws:
        raise ValueError(f"{draws:,} draws of {posterior.layout.n_dim:,} coordinates are too many: take {most:,}.")
    theta = posterior.draw(draws, rng)
    log_ratio = posterior.density.logp(theta) - posterior.log_q(theta)
    finite = np.isfinite(log_ratio)
    if np.any(log_ratio == np.inf) or not finite.any():
        where = "infinite at some" if finite.any() else "finite at none"
        raise ValueError(f"log p is {where} of {draws:,} draws of q: weights p/q can't correct it.")
    check_help(weigh(log_ratio)[1])
    new = Draws.of_equal_weight(theta).reweighted(log_ratio)
    checks = WeightChecks.of(new, f"Draws of {posterior.kind}, with importance weights.", (), "", is_of_exact=False)
    mass = log_mean(log_ratio, np.zeros(draws))
    return Weighted(posterior.density, _state(checks, mass, new), log_ratio, lambda: mass)


def check_help(found: Weights) -> None:
    """Raise ValueError where k-hat says that weights can't help."""
    if found.verdict().helps or found.effective > _NOTHING_TO_CORRECT * found.n_draws:
        return
    cure, limit = _RICHER, khat_limit(found.n_draws)
    if found.khat < khat_limit(_MOST_DRAWS):
        needed = rounded_up(max(10.0 ** (1.0 / (1.0 - found.khat)), N_SHOWN))
        cure = f"Take {needed:,.0f} draws or more, if it stays so; or f{_RICHER[1:]}"
    raise ValueError(
        f"Pareto k-hat is {found.khat:.2f}, and {found.n_draws:,} draws of q allow for {limit:.2f} at most: importance "
        f"weights can't correct what q misses. {cure}"
    )


def joint_draws(posterior: Posterior, n: int, rng: np.random.Generator) -> tuple[Draws, tuple[str, ...]]:
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


# --- other priors ---


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
            density: ModelDensity = copy.copy(old)
            density.elsewhere = "its priors are others than those of the models of its data"
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


# --- new rows of a model, checked, and their log densities at draws of the posterior ---

type Values = Mapping[str, AnyArray]


class NewRows:
    """New rows, and the variables that these depend on."""

    def __init__(self, posterior: Posterior, given: Given) -> None:
        self._posterior = posterior
        #: The rows of a Bambi model that is known.
        self.frame = given if hasattr(given, "columns") and posterior.layout.bambi.spec is not None else None
        observed: dict[str, Any]
        if self.frame is None:
            observed, data = _split(posterior.density.given, given)
            self.new = NewData.of(posterior.density.given, posterior.layout.coords, data)
        else:
            self.new = rows_of_bambi(posterior, given, observed=True)
            observed = {rv.name: None for rv in self.new.model.observed_RVs}
        model, self.graph = self.new.model, self.new.graph()
        names = list(observed)
        self.new.check_complete(self.graph.data_needed(names))
        self.data = self.graph.data_needed(names)
        self.deterministics = [d.name for d in model.deterministics if self._is_complete(d.name)]
        shapes = self.graph.shapes([model[name] for name in observed], new=False)
        #: Of the observed variables in the fit.
        self.shapes = dict(zip(observed, shapes, strict=True))
        rows = {shape[:1] for shape in shapes if shape}
        if forgotten := [k for k in self.data if k not in self.new.arrays and self.new.before(k).shape[:1] in rows]:
            raise ValueError(
                f"{quoted(forgotten)} has a value for each row, and none was given for the new rows: give as many "
                "values as there are new rows."
            )
        held = [name for name, values in observed.items() if values is None]
        observed |= dict(zip(held, self._told(lambda: self.graph.observed(held)), strict=True))
        self.observed = {name: _checked(model[name], values, self.shapes[name]) for name, values in observed.items()}
        needed = self.graph.needed([*names, *self.deterministics])
        self._free = Constrainer.of(
            posterior.density, deterministics=False, names=frozenset(v.name for v in posterior.layout.variables)
        )
        needed_names = {rv.name for rv in needed}
        #: Discrete variables that were summed out: drawn given each draw of the others, and weighted with it.
        self._discrete = [name for name in posterior.density.summed_out.names if name in needed_names]
        if self._discrete and posterior.changed_data():
            raise ValueError(f"{quoted(self._discrete)} are drawn given the rows of the fit, which are not there.")
        self._functions: dict[object, tuple[OnDraws, list[str]]] = {}
        #: A draw to look at; where a coefficient is 0, it may hide things.
        self.point = posterior.density.initial_point()[None]
        one = self.in_fit(self.point)
        self.new.check_indices(self.graph, [*one])
        # Each element by its number in the fit: treatments tell where it is now.
        numbers = {name: np.arange(of.size).reshape(of.shape) for name, of in one.items()}
        plan = Treatments(posterior, self.graph, self.new, self.new, "new", frozenset(), numbers, {})
        self._treatments = plan.of([rv for rv in needed if rv.name not in self.observed])
        self._treatments |= {name: Treatment(size=self._rows_of(name)) for name in self.observed}
        self.has_known_discrete = any(self._treatments[name].known is not None for name in self._discrete)
        self._check_priors()
        treated = {name: t for name in numbers if (t := self._treatments.get(name)) is not None}
        self.grown = [n for n, t in treated.items() if t.known is None or t.mask is not None or t.n_known is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: functions are compiled again."""
        return {**vars(self), "_functions": {}}

    def _check_priors(self) -> None:
        """Raise ValueError where new data change log p of what was in the fit: that is no matter of new rows."""
        model = self.graph.model
        for potential in model.potentials:
            if self.graph.depends_on_new(potential):
                raise ValueError(f"The Potential {potential.name!r} depends on the new data: fit again with all rows.")
        for variable in self._names:
            if self._treatments[variable].known is None:
                continue
            for name in self.new.arrays:
                if self.graph.prior_reads(model[variable], name) and not self.new.goes_on(name):
                    raise ValueError(
                        f"The prior of {variable!r} depends on {name!r}, which is not what it was in the fit: give the "
                        "same values for what was in it, or fit again."
                    )

    @property
    def n_rows(self) -> int:
        """Number of new observations."""
        return sum(math.prod(self._rows_of(name)) for name in self.observed)

    def _rows_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the new observations of a variable, whose vectors are one each."""
        return self.observed[name].shape[: n_batch_axes(self.graph.model[name])]

    def _is_complete(self, name: str) -> bool:
        """Tell whether all data that a variable is computed from are those of the new rows, or of all rows."""
        try:
            self.new.check_complete(self.graph.data_needed([name]))
        except ValueError:
            return False
        return True

    def in_fit(self, theta: Array) -> dict[str, AnyArray]:
        """Return the free variables on their constrained scale, as they are in the fit, (n, *shape).

        Discrete variables that were summed out are drawn given the others and the data of the fit.
        """
        values = self._free(theta)
        drawn = self._posterior.density.discrete_given(values, FIXED_SEED) if self._discrete else {}
        return values | {name: drawn[name] for name in self._discrete}

    def free(self, theta: Array) -> dict[str, AnyArray]:
        """Return the same with elements where these are now, of variables that have some of the fit."""
        values = self.in_fit(theta)
        for name in self._names:
            if (numbers := self._treatments[name].known) is not None:
                values[name] = values[name].reshape(len(theta), -1)[:, numbers[0].astype(np.intp)]
        return values

    # --- elements that were not in the fit ---

    def known(self, free: Values, drawn: Values) -> dict[str, AnyArray]:
        """Return the variables that the rows depend on, with elements that were not in the fit from ``drawn``."""
        found = {}
        for name in self._names:
            old = free[name] if self._treatments[name].known is not None else None
            if name in drawn:
                of_name = np.broadcast_to(drawn[name], (length_of(free), *drawn[name].shape[1:]))
                old = of_name if old is None else np.where(self.is_new[name], of_name, old)
            found[name] = cast(AnyArray, old)
        return found

    def drawn(self, free: Values, random_seed: int) -> dict[str, AnyArray]:
        """Return the variables that have grown, with draws of their new elements from their prior given all others."""
        if not self.grown:
            return {}
        old = {name: free[name] for name in self._names if self._treatments[name].known is not None}
        found = self._evaluated(
            "draws", lambda ts: self.graph.compiled(self.grown, ts, 1), old, length_of(free), random_seed
        )
        return dict(zip(self.grown, found, strict=True))

    @cached_property
    def some(self) -> dict[str, AnyArray]:
        """Return one draw of the variables that have grown, (1, *shape)."""
        return self.drawn(self.free(self.point), 0)

    @cached_property
    def is_new(self) -> dict[str, Bools]:
        """Tell which elements of the variables that have grown were not in the fit."""
        found = {}
        for name in self.grown:
            t = self._treatments[name]
            new = np.full(self.some[name].shape[1:], t.known is None)
            if t.mask is not None:
                new |= ~t.mask
            if t.n_known is not None:
                new[(slice(None),) * n_batch_axes(self.graph.model[name]) + (slice(t.n_known, None),)] = True
            found[name] = new
        return found

    def changes(self, drawn: Values, seed: int) -> list[Values]:
        """Return other values of what was drawn anew: other draws, and each state of a discrete variable."""
        found: list[Values] = [self.drawn(self.free(self.point), seed)]
        for name in {*self._discrete} & {*self.grown}:
            from pymc_ngvi.density.discrete.states import states_of  # pymc_extras

            states = states_of(self.graph.model[name])
            found += [{**found[0], name: np.full_like(drawn[name], state)} for state in states]
        return found

    def n_apart(self, name: str) -> int:
        """Return the first axes of a variable along which new elements have priors of their own: none of a series."""
        return n_batch_axes(self.graph.model[name]) if self._treatments[name].n_known is None else 0

    # --- what depends on them ---

    def logp(self, known: Values) -> Array:
        """Return the log densities of the new rows, (n, n_rows), given the variables that they depend on."""
        n = length_of(known)
        values = self._evaluated(
            "rows", lambda ts: self.graph.log_densities([*self.observed], self.observed, ts, 1), known, n
        )
        for name, of_name in zip(self.observed, values, strict=True):
            if of_name.shape[1:] != self._rows_of(name):
                raise ValueError(
                    f"{name!r} has new values of {self._rows_of(name)} rows, and with the other new data it has "
                    f"{of_name.shape[1:]}: give the same rows of all."
                )
        return np.concatenate([np.asarray(v, dtype=np.float64).reshape(n, -1) for v in values], axis=1)

    def check_possible(self, theta: Array) -> None:
        """Raise ValueError where rows have a density of 0 at all of some draws."""
        free = self.free(theta[:: len(theta) * self.n_rows // HELD + 1])
        is_possible = np.isfinite(self.logp(self.known(free, self.drawn(free, FIXED_SEED)))).any(axis=0)
        for name in self.observed:
            shape = self._rows_of(name)
            of_name, is_possible = np.split(is_possible, [math.prod(shape)])
            if bad := np.flatnonzero(~of_name).tolist():
                values = self.observed[name].reshape(-1, *self.observed[name].shape[len(shape) :])[bad]
                raise ValueError(
                    f"{name!r} can't have the values {listed(values.tolist())}, of rows {listed(bad)}: their density "
                    "is 0 at all draws of the posterior. Look at these rows, or fit again with all of them."
                )

    @property
    def has_elementwise_priors(self) -> bool:
        """Whether elements of the variables that have grown have log densities of their own."""
        return all(self.n_apart(name) == self.graph.model[name].type.ndim for name in self.grown)

    @property
    def is_free(self) -> bool:
        """Whether new elements have log densities of their own, and may have any values."""
        model = self.graph.model
        return self.has_elementwise_priors and all(
            name not in self._discrete and model.rvs_to_transforms.get(model[name]) is None for name in self.grown
        )

    def prior_logp(self, known: Values) -> dict[str, Array]:
        """Return the log densities of the elements of variables that have grown, (n, *shape), given all else."""
        found = self._evaluated(
            "prior", lambda ts: self.graph.log_densities(self.grown, {}, ts, 1), known, length_of(known)
        )
        return dict(zip(self.grown, found, strict=True))

    @property
    def _names(self) -> list[str]:
        return [name for name in self._treatments if name not in self.observed]

    def _evaluated(
        self,
        what: object,
        compiled: Callable[[dict[str, Treatment]], tuple[OnDraws, Array]],
        values: Values,
        n: int,
        random_seed: int | None = None,
    ) -> Sequence[AnyArray]:
        """Return what a function of variables gives, compiled when it is first asked for; a seed: what it draws."""
        if what not in self._functions:
            treatments = {}
            for name, t in self._treatments.items():
                known = values[name][:1] if name in values else None
                whole = Treatment(known=known) if random_seed is None else replace(t, known=known)
                treatments[name] = t if name in self.observed else whole
            function = self._told(lambda: compiled(treatments))[0]
            self._functions[what] = function, [name for name in self._names if name in values]
        function, names = self._functions[what]
        if random_seed is not None:
            function.reseed(random_seed)
        # Behind the number that `PredictiveGraph` puts before them.
        parts = [np.zeros((n, 1)), *(np.asarray(values[name], dtype=np.float64).reshape(n, -1) for name in names)]
        return self._told(lambda: function(np.concatenate(parts, axis=1)))

    def _told[T](self, do: Callable[[], T]) -> T:
        """Do something with the model given the new rows; raise ValueError where it can't be done."""
        return given_new_data(do, self.new, self.data)


def length_of(values: Values) -> int:
    """Return the number of draws."""
    return len(next(iter(values.values())))


# --- what was given ---


def _split(model: pm.Model, given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return new observations by the name of the variable, None where data of the model hold them, and these data."""
    observed, rest = {}, dict(checked_dict(given))
    for rv in model.observed_RVs:
        sources = data_behind(model, rv)
        if rv.name in rest and (twice := [name for name in sources if name != rv.name and name in rest]):
            raise ValueError(f"{rv.name!r} and {twice[0]!r} are the same data: give one of them.")
        if rv.name in rest:
            array = rest.pop(rv.name)
            if len(sources) > 1:
                raise ValueError(f"{rv.name!r} is made of {quoted(sources)}: give these.")
            rest |= dict.fromkeys(sources, array)
            observed[rv.name] = None if sources else array
        elif any(name in rest for name in sources):
            observed[rv.name] = None
    if not observed:
        names = [rv.name for rv in model.observed_RVs]
        said = f"give those of {quoted(names)}" if names else "the model has no observed variable"
        raise ValueError(f"new_data has no observations: {said}.")
    return observed, rest


def _checked(rv: Any, values: Any, of_fit: tuple[int, ...]) -> AnyArray:
    """Return new values of an observed variable, which had some shape in the fit."""
    n_batch = n_batch_axes(rv)
    if not n_batch and rv.type.ndim:
        raise ValueError(
            f"The elements of {rv.name!r} have one distribution together: new ones can't be put beside those of the "
            "fit. Fit again with all of them."
        )
    try:
        array = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan)
    except (ValueError, TypeError):
        raise ValueError(f"{rv.name!r} should be numbers in an array; got {shortened(values)}.") from None
    if array.ndim != rv.type.ndim or array.shape[n_batch:] != of_fit[n_batch:]:
        raise ValueError(f"{rv.name!r} has shape {array.shape}; in the fit it had {of_fit}, rows along the first axis.")
    if np.isnan(array).any():
        raise ValueError(f"{rv.name!r} has missing values: leave these rows out.")
    if not array.size:
        raise ValueError(f"{rv.name!r} has no new rows.")
    if np.dtype(rv.type.dtype).kind in "iu" and not np.array_equal(array, np.round(array)):
        raise ValueError(f"{rv.name!r} should be whole numbers, as in the model; got {shortened(values)}.")
    return array.astype(rv.type.dtype)


# --- elements that were not in the fit, such as effects of new groups, given the rows that depend on them ---
# They are drawn many times for each draw of the posterior: from their prior given all else, and, where they may have
# any values, about where their rows say that they are. The mean weight of these candidates is the predictive density
# of the rows, and one of them is picked by its weight: importance sampling for each new group by itself, which does
# not suffer from their number.

#: Candidates at first and at most; variance of log densities, in all, from which on there are more.
_FIRST, _MOST, _MOST_VARIANCE = 8, 1_024, 0.1
#: Candidates from the prior that tell where new elements are; part of the later ones that are from it; how much wider
#: the others are, and their degrees of freedom.
_PILOTS, _FROM_PRIOR, _WIDER, _DF = 4, 0.2, 1.3, LEAST_DF


def rows_on_new(rows: NewRows) -> tuple[sparse.csr_array, dict[str, Indices]]:
    """Return which rows depend on which new elements, (n_rows, n_numbers), and the numbers of the elements.

    Elements have the same number where they belong together, such as those of a walk or a process. Others have -1.
    """
    numbers = _numbers(rows)
    n = 1 + max(int(of.max()) for of in numbers.values())
    free, first = rows.free(rows.point), rows.some
    others = rows.changes(first, 1)
    same = rows.known(free, first)
    # In each of so many points, the elements of one number are other ones.
    moved = {
        name: np.concatenate(
            [np.where(of == np.arange(n).reshape(-1, *(1,) * of.ndim), other[name], first[name]) for other in others]
        )
        for name, of in numbers.items()
    }
    many = rows.known({name: np.repeat(values, n * len(others), axis=0) for name, values in free.items()}, moved)
    differ = (rows.logp(many) != rows.logp(same)).reshape(len(others), n, -1)
    depends = sparse.csr_array(differ.any(axis=0).T)
    part = _tied(rows, numbers, same, many)
    joined = sparse.csr_array((np.ones(n, dtype=bool), (np.arange(n), part)))
    return depends @ joined, {name: np.where(of < 0, -1, part[of]) for name, of in numbers.items()}


def with_new_elements(
    rows: NewRows, free: Values, log_weights: Array, depends: sparse.csr_array, numbers: dict[str, Indices],
    rng: np.random.Generator,
) -> tuple[Array, dict[str, AnyArray], float]:  # fmt: skip
    """Return new elements at draws of the free variables.

    The log predictive density of the rows that depend on them, (n,), the variables that have them, (n, *shape), and the
    variance of the error of the first.
    """
    # Numbers that a row has in common are drawn together.
    n_parts, part = csgraph.connected_components(depends.T @ depends, directed=False)
    which = np.flatnonzero(np.diff(depends.indptr))
    of_row = part[depends.indices[depends.indptr[which]]]
    sums = sparse.csr_array((np.ones(len(which)), (of_row, which)), shape=(n_parts, depends.shape[0]))
    part_of = {name: np.where(of < 0, -1, part[of]) for name, of in numbers.items()}
    proposal = _Proposal(rows, free, part_of, n_parts, rng)

    def of_rows(drawn: Values) -> Array:
        return (sums @ rows.logp(rows.known(free, drawn)).T).T

    if rows.is_free:
        pilots = [rows.drawn(free, seed_of(rng)) for _ in range(_PILOTS)]
        proposal.learn(pilots, [of_rows(drawn) for drawn in pilots], log_weights)
    most = max(_FIRST, min(_MOST, HELD // (len(log_weights) * (n_parts + len(proposal.part)))))
    # Of the candidates of each part, one is kept, with a chance in proportion to its weight.
    log_sum, log_square, chosen = np.full((1, n_parts), -np.inf), np.full((1, n_parts), -np.inf), dict[str, AnyArray]()
    for n in range(1, most + 1):
        drawn, log_ratio = proposal.draw()
        log_density = of_rows(drawn) + log_ratio
        log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
        log_sum, log_square = np.logaddexp(log_sum, log_density), np.logaddexp(log_square, 2.0 * log_density)
        with np.errstate(invalid="ignore"):
            taken = np.log(rng.random(log_density.shape)) < log_density - log_sum
            of_weights = np.exp(log_square - 2.0 * log_sum) - 1.0 / n
        for name, part in part_of.items():
            kept = taken[:, np.maximum(part, 0)] & (part >= 0)
            chosen[name] = np.where(kept, drawn[name], chosen.get(name, drawn[name]))
        # That of the error of the sum of logarithms over parts, in the mean over draws.
        variance = float(np.nan_to_num(of_weights, nan=1.0).sum(axis=1).mean())
        if n >= _FIRST and variance < _MOST_VARIANCE:
            break
    return (log_sum - np.log(n)).sum(axis=1), chosen, variance


def _tied(rows: NewRows, numbers: dict[str, Indices], same: Values, many: Values) -> Indices:
    """Return one number for those of which one is a parameter of the prior of another, as a school is of its class."""
    n = 1 + max(int(of.max()) for of in numbers.values())
    if len(numbers) < 2:
        return np.arange(n)
    if not rows.has_elementwise_priors:
        return np.zeros(n, dtype=np.intp)
    before, after, ties = rows.prior_logp(same), rows.prior_logp(many), np.eye(n, dtype=bool)
    for name, of in numbers.items():
        differ = (after[name] != before[name]).reshape(-1, n, of.size).any(axis=0)
        moved, element = np.nonzero(differ & (of.ravel() >= 0))
        ties[moved, of.ravel()[element]] = True
    return csgraph.connected_components(sparse.csr_array(ties), directed=False)[1].astype(np.intp)


class _Proposal:
    """Where candidates are drawn: from the prior, and, once it has learned, mostly where rows say that they are."""

    def __init__(
        self, rows: NewRows, free: Values, parts: dict[str, Indices], n_parts: int, rng: np.random.Generator
    ) -> None:
        self._rows, self._free, self._n_parts, self._rng = rows, free, n_parts, rng
        self._places = {name: np.flatnonzero(of >= 0) for name, of in parts.items()}
        self.part = np.concatenate([parts[name].ravel()[at] for name, at in self._places.items()])
        shape = (n_parts, len(self.part))
        self._sums = sparse.csr_array((np.ones(len(self.part)), (self.part, np.arange(len(self.part)))), shape=shape)
        self._learned: list[tuple[Indices, Array, Array]] | None = None

    def learn(self, pilots: Sequence[Values], log_density: Sequence[Array], log_weights: Array) -> None:
        """Learn where elements are, from draws of their prior with the log densities of their rows, (n, n_parts)."""
        values = np.concatenate([self._elements(drawn) for drawn in pilots])
        log_all = np.concatenate([of + log_weights[:, None] for of in log_density])
        learned = []
        for p in range(self._n_parts):
            at, of_part = np.flatnonzero(self.part == p), log_all[:, p]
            w = np.exp(of_part - of_part.max()) if np.isfinite(of_part.max()) else np.ones(len(of_part))
            w /= w.sum()
            mean = w @ values[:, at]
            apart = values[:, at] - mean
            cov, wide = (apart.T * w) @ apart, np.diag(values[:, at].var(axis=0))
            few = len(at) / (len(at) + 1.0 / np.sum(w**2))  # of few effective draws, moments are those of the prior
            learned.append((at, mean, _WIDER * np.linalg.cholesky((1.0 - few) * cov + few * wide)))
        self._learned = learned

    def draw(self) -> tuple[dict[str, AnyArray], Array]:
        """Return one candidate of all parts, and its log density under the prior over that here, (n, n_parts)."""
        drawn, rng = self._rows.drawn(self._free, seed_of(self._rng)), self._rng
        values = self._elements(drawn)
        n = len(values)
        if self._learned is None:
            return drawn, np.zeros((n, self._n_parts))
        from_prior = rng.random((n, self._n_parts)) < _FROM_PRIOR
        log_q = np.empty((n, self._n_parts))
        for p, (at, mean, factor) in enumerate(self._learned):
            z = rng.standard_normal((n, len(at))) / np.sqrt(rng.chisquare(_DF, n) / _DF)[:, None]
            values[:, at] = np.where(from_prior[:, [p]], values[:, at], mean + z @ factor.T)
            log_q[:, p] = StudentMixture(np.ones(1), mean[None], factor[None], _DF).log_density(values[:, at])
        drawn = self._with(drawn, values)
        prior = self._rows.prior_logp(self._rows.known(self._free, drawn))
        log_prior = (self._sums @ self._elements(prior).T).T
        return drawn, log_prior - np.logaddexp(np.log(_FROM_PRIOR) + log_prior, np.log1p(-_FROM_PRIOR) + log_q)

    def _elements(self, drawn: Values) -> Array:
        """Return all new elements, (n, n_elements)."""
        parts = [np.asarray(drawn[name]).reshape(len(drawn[name]), -1)[:, at] for name, at in self._places.items()]
        return np.concatenate(parts, axis=1).astype(np.float64)

    def _with(self, drawn: Values, values: Array) -> dict[str, AnyArray]:
        """Return variables with new elements in their places."""
        ends = np.cumsum([len(at) for at in self._places.values()])[:-1]
        result = {}
        for (name, at), of_name in zip(self._places.items(), np.split(values, ends, axis=1), strict=True):
            flat = np.array(drawn[name]).reshape(len(values), -1)
            flat[:, at] = of_name
            result[name] = flat.reshape(drawn[name].shape)
        return result


def _numbers(rows: NewRows) -> dict[str, Indices]:
    """Return the number of what each element belongs to, by variable; -1 for those that were in the fit.

    The elements of a series, or of a vector, belong together.
    """
    result, n = {}, 0
    for name, new in rows.is_new.items():
        apart = new.any(axis=tuple(range(rows.n_apart(name), new.ndim)), keepdims=True)
        result[name] = np.where(new, n + np.cumsum(apart).reshape(apart.shape) - 1, -1)
        n += int(apart.sum())
    return result


# --- the posterior given new rows as well, from draws of the one that was fitted, by importance weights ---

#: Standard deviations that a conditional mean may move by: farther out, only moments are known of it; and less where
#: these are skewed by more than this.
_FARTHEST, _FARTHEST_SKEWED, _SKEWED = 2.0, 0.25, 0.8
#: Draws for each that was asked for, at most, where new elements are drawn for each of them.
_MANY = 2
#: Draws at which groups are integrated again.
_N_AGAIN = 64
#: Variance, from which on that of the log weights is too much of the noise of new elements.
_NOISE = 0.25
_FIT_AGAIN = "Fit again with all of the rows."


def updated(posterior: Posterior, new_data: Given, draws: int, rng: np.random.Generator) -> Weighted:
    """Return the posterior given new rows as well; see `NGVIApproximation.update`."""
    posterior.check_weighable(draws)
    with posterior.with_data_of_fit():
        rows = NewRows(posterior, new_data)
        made, doubts = _draws(posterior, draws, rng)
        if rows.grown and (step := len(made.theta) // (_MANY * draws)) > 1:  # evenly, about as many as are wanted
            every = slice(None, None, step)
            kept = made.theta[every], made.log_weights[every], made.of_globals[every], made.part[every]
            made = Draws(*kept, min(1.0, step * made.worth))
        rows.point = made.theta[made.log_weights.argmax()][None]
        rows.check_possible(made.theta)
        log_ratio, known, of_known, values, of_rows = _with_rows(posterior, rows, made, rng)
        if not np.isfinite(made.log_weights + log_ratio).any():
            raise ValueError(f"The new rows are impossible together at all draws of the posterior. {_FIT_AGAIN}")
        made = made._replace(theta=known.theta)
        density, moved = _with_all_rows(posterior, rows, values, known.theta)
    result = weighted(
        posterior, made, log_ratio, f"Posterior with {_named(rows)}.", (*of_rows, *doubts), _FIT_AGAIN, density, draws,
        moved,
    )  # fmt: skip
    change = functools.partial(
        _log_density_of, posterior, rows, made, log_ratio, of_known, known.log_ratio, seed_of(rng)
    )
    return result._replace(change=change)


def _named(rows: NewRows) -> str:
    """Return how many rows there are, and which levels are new."""
    said, new = f"{rows.n_rows:,} new row{'s' if rows.n_rows > 1 else ''}", rows.new
    grown = {dim for name in rows.grown for dim in new.dims(name) if dim in new.labels and dim in new.of_fit}
    levels = {dim: [k for k in new.labels[dim] if k not in new.of_fit[dim]] for dim in sorted(map(str, grown))}
    return ", ".join([said, *(f"new levels of {dim!r} {listed(found)}" for dim, found in levels.items() if found)])


def _log_density_of(
    posterior: Posterior, rows: NewRows, made: Draws, log_ratio: Array, of_known: Indices, log_known: Array, seed: int
) -> Estimate:
    """Return the log density of new rows given those of the fit; that of those which depend on nothing new is known."""
    found, state = log_mean(log_ratio, made.log_weights, part=made.part), with_trees(posterior.distribution.q)
    if state is None or not len(of_known) or rows.has_known_discrete:
        return found
    # Groups are known by their moments: what that moves is told by their integrals at some draws.
    weights, rng = np.exp(weigh(made.reweighted(log_ratio).log_weights)[0]), np.random.default_rng(seed)
    some = evenly_picked(weights, _N_AGAIN, rng.random())
    logp = functools.partial(_log_densities, rows, of_known)
    with posterior.with_data_of_fit():
        has_rows = not posterior.changed_data()
        try:
            again = integrated_again(made.theta[some], state, logp, has_rows=has_rows)
        except CoupledRows:  # which were weighted
            return found
    ratio = np.exp(again - log_known[some])
    mean, error = float(ratio.mean()), float(ratio.std()) / math.sqrt(len(ratio))
    if not has_rows:
        return found._replace(se=math.hypot(found.se, math.log(mean)))
    return found._replace(value=found.value + math.log(mean), se=math.hypot(found.se, error / mean))


# --- the model with all rows, those of the fit first, and draws in its coordinates ---


class _AllRows:
    """A model with the rows of the fit and new ones, or with the new ones alone where the others are not there."""

    def __init__(self, rows: NewRows, *, has_rows: bool) -> None:
        self._rows, self._new, self._has_rows = rows, rows.new, has_rows
        #: Lengths that rows had, and dims along which there are rows: not those of levels, into which data index.
        self._lengths = {shape[0] for shape in rows.shapes.values() if shape}
        levels = set[str]().union(*(indexed_axes(self._new.model, name)[0] for name in self._new.arrays))
        of_data = [
            name for name in self._new.arrays if self._new.before(name).shape[:1] in {(n,) for n in self._lengths}
        ]
        of_rows = {dim for name in [*rows.observed, *of_data] for dim in self._new.dims(name)[:1]} - levels
        self._dims = {dim for dim in of_rows if dim is not None}
        #: Labels along dims; rows that have none, or those of others, are numbered.
        self._labels = dict[str, list[Any]]()
        for dim, labels in ({key: [] for key in self._dims & self._new.of_fit.keys()} | self._new.labels).items():
            known = self._new.of_fit.get(dim, []) if has_rows else []
            found = [*known, *(label for label in labels if label not in set(known))]
            along = (of.shape[0] for name, of in rows.observed.items() if self._new.dims(name)[:1] == (dim,))
            n = len(known) + self._new.lengths.get(dim, max(along, default=0))
            self._labels[dim] = list(range(n)) if dim in self._dims and len(found) != n else found

    def model(self) -> pm.Model:
        """Return a copy of the model with these rows; what it standardises its data by is that of the fit."""
        rows, new, given = self._rows, self._new, self._new.model
        held = [name for name in rows.observed if not data_behind(given, given[name])]
        model, names = with_data_for(rows.graph.with_statistics(), held)
        arrays = new.arrays | {names[name]: rows.observed[name] for name in held}
        for name, array in arrays.items():
            dims = tuple(model.named_vars_to_dims.get(name) or (None,) * array.ndim)
            before = model[name].get_value(borrow=True)
            of_new = self._new.relabelled(name, self._labels) if name in self._new.arrays else array
            joined = self.joined(dims, before[None], of_new[None])[0]
            model.set_data(name, joined, {d: self._labels[d] for d in dims if d in self._labels})
        for dim, labels in self._labels.items():
            if len(model.coords[dim]) != len(labels):
                model.set_dim(dim, len(labels), labels)
        return model

    def joined(self, dims: Sequence[str | None], old: AnyArray, new: AnyArray) -> AnyArray:
        """Return arrays, (n_draws, *shape), with the elements of the fit and new ones, which count where both are."""
        lengths, places = list[int](), list[Indices]()
        for axis, (dim, before, now) in enumerate(zip(dims, old.shape[1:], new.shape[1:], strict=True)):
            is_of_rows = dim in self._dims or (dim not in self._labels and axis == 0 and before in self._lengths)
            if dim in self._new.labels and not is_of_rows:
                lengths.append(len(self._labels[dim]))
                places.append(places_among(self._new.labels[dim], self._labels[dim]))
                continue
            start = before if is_of_rows and self._has_rows else 0
            lengths.append(max(start + now, before if self._has_rows else 0))
            places.append(start + np.arange(now))
        result = np.zeros((len(new), *lengths), dtype=new.dtype)
        if self._has_rows:
            result[(slice(None), *(slice(n) for n in old.shape[1:]))] = old
        result[np.ix_(np.arange(len(new)), *places)] = new
        return result


def _with_all_rows(
    posterior: Posterior, rows: NewRows, values: Values, theta: Array
) -> tuple[ModelDensity, Array | None]:
    """Return log p given all rows, or those that are there, and draws in its coordinates."""
    has_rows = not (posterior.changed_data() or posterior.density.why_in_part or posterior.density.is_streamed)
    every = _AllRows(rows, has_rows=has_rows)
    if rows.frame is None:
        model = every.model()
    else:
        frame = pd.concat([posterior.layout.bambi.data, rows.frame]) if has_rows else rows.frame
        model = rows_of_bambi(posterior, frame, observed=True).model
    density = LogDensity(model, backend=posterior.density.backend, checks_derivatives=False)
    if not has_rows:
        density.elsewhere = "the rows of the fit are not there"
    if has_rows and density.layout.variables == posterior.layout.variables:
        return density, None
    old, free = {v.name: v for v in posterior.layout.variables}, rows.in_fit(theta)
    result, grown = np.empty((len(theta), density.n_dim)), []
    for v in density.layout.variables:
        if v.shape == old[v.name].shape and (has_rows or v.name not in values):
            result[:, v.where] = theta[:, old[v.name].where]
            continue
        grown.append(v.name)
        free[v.name] = every.joined(rows.new.dims(v.name), free[v.name], values[v.name])
    return density, unconstrained(density, grown, free, result)


def _with_rows(
    posterior: Posterior, rows: NewRows, made: Draws, rng: np.random.Generator
) -> tuple[Array, WithNewRows, Indices, Values, tuple[str, ...]]:
    """Return what new rows say of each draw, where it is then, with what was not in the fit, and what is doubtful."""
    depends, numbers = rows_on_new(rows) if rows.grown else (None, {})
    of_known = np.arange(rows.n_rows) if depends is None else np.flatnonzero(np.diff(depends.indptr) == 0)
    known = None
    if len(of_known) and (state := with_trees(posterior.distribution.q)) is not None and not rows.has_known_discrete:
        with contextlib.suppress(CoupledRows):  # weights may do
            logp = functools.partial(_log_densities, rows, of_known)
            known = beside(made.theta, state.centres, state.forest, logp, state.skew)
    if known is None:
        log_densities = _log_densities(rows, of_known, made.theta)
        known = WithNewRows(log_densities.sum(axis=1), made.theta, np.zeros(len(made.theta)))
    free = rows.free(known.theta)
    log_ratio, doubts = known.log_ratio, list[str]()
    finite = np.isfinite(made.log_weights + log_ratio)
    moved = float(softmax((made.log_weights + log_ratio)[finite]) @ known.moved[finite]) if finite.any() else 0.0
    if moved > _FARTHEST:
        doubts.append(f"the conditional mean of a group moves by {moved:.1f} of its standard deviations")
    elif moved > _FARTHEST_SKEWED and known.skewness > _SKEWED:
        doubts.append("the conditional distribution of a group with new rows is skewed, and known by its moments only")
    drawn: dict[str, AnyArray] = {}
    if depends is not None:
        of_new, drawn, variance = with_new_elements(rows, free, made.log_weights + log_ratio, depends, numbers, rng)
        log_ratio = log_ratio + of_new
        if variance > _NOISE:
            doubts.append("the densities of rows of new levels are known from few candidates")
    log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
    return log_ratio, known, of_known, rows.known(free, drawn), tuple(doubts)


def _log_densities(rows: NewRows, which: Indices, theta: Array) -> Array:
    return rows.logp(rows.known(rows.free(theta), rows.some))[:, which]


def _draws(posterior: Posterior, draws: int, rng: np.random.Generator) -> tuple[Draws, tuple[str, ...]]:
    """Return draws of the posterior, and what stands against relying on them."""
    state, has_rows = with_trees(posterior.distribution.q), not posterior.changed_data()
    if state is not None:
        doubts = () if posterior.record is None else posterior.record.doubts
        if np.abs(state.skew).max(initial=0.0) < _SKEWED:
            return draws_without_rows(state, draws, rng), doubts
        if has_rows:
            return posterior.distribution.joint(draws, rng), doubts
        said = "conditional distributions of groups are skewed, and without the rows of the fit known by moments only"
        return draws_without_rows(state, draws, rng), (*doubts, said)
    if not has_rows and posterior.distribution.kept_log_weights() is None:
        said = f"the draws are those of {posterior.kind}, which is not compared with log p: its data are not there"
        return posterior.distribution.joint(draws, rng), (said,)
    return joint_draws(posterior, draws, rng)
