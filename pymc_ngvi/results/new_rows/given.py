"""New rows of a model, checked, and their log densities at draws of the posterior."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pymc as pm

from numpy.typing import NDArray

from pymc_ngvi.core.messages import shortened
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.constrain import Constrainer, OnDraws
from pymc_ngvi.density.predictive import PredictiveGraph, Treatment, data_behind
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.predictions.new_data import Given, NewData
from pymc_ngvi.results.predictions.predict import given_new_data
from pymc_ngvi.results.predictions.treatments import Treatments

type Values = Mapping[str, AnyArray]


class NewRows:
    """New rows, and the variables that these depend on."""

    def __init__(self, posterior: Posterior, given: Given) -> None:
        model = posterior.density.given
        self._posterior = posterior
        observed, data = _split(model, given)
        self.new = NewData.of(model, posterior.layout.coords, data)
        lengths = {dim: n for dim, n in self.new.lengths.items() if dim in model.dim_lengths}
        self._graph = PredictiveGraph(model, self.new.arrays, lengths)
        names = list(observed)
        self.new.check_complete(self._graph.data_needed(names))
        self.data = self._graph.data_needed(names)
        self.deterministics = [d.name for d in posterior.density.deterministics if self._is_complete(d.name)]
        held = [name for name, values in observed.items() if values is None]
        observed |= dict(zip(held, self._told(lambda: self._graph.observed(held)), strict=True))
        self.observed = {name: _checked(model[name], values) for name, values in observed.items()}
        needed = self._graph.needed([*names, *self.deterministics])
        self._free = Constrainer.of(
            posterior.density, deterministics=False, names=frozenset(v.name for v in posterior.layout.variables)
        )
        self._of_last: tuple[Values, dict[str, AnyArray]] = {}, {}
        self.point = posterior.density.initial_point()[None]
        one = self.free(self.point)
        self.new.check_fixed({name: of.shape[1:] for name, of in one.items()})
        # Each element by its number in the fit: treatments tell where it is now.
        numbers = {name: np.arange(of.size).reshape(of.shape) for name, of in one.items()}
        plan = Treatments(posterior, self._graph, self.new, "new", frozenset(), numbers, {})
        self._treatments = plan.of(needed)
        self._treatments |= {name: Treatment(size=values.shape) for name, values in self.observed.items()}
        self._check_priors()
        self.grown = [name for name in numbers if name in self._treatments and _has_grown(self._treatments[name])]

    def only(self, which: NDArray[np.intp]) -> "NewRows | None":
        """Return some of the rows alone, ascending; None where they can't be taken apart from the others."""
        n = {len(values) for values in self.observed.values()}
        if (
            len(which) == self.n_rows
            or {values.ndim for values in self.observed.values()} != {1}
            or len(self.observed) > 1
        ):
            return None
        by_row = {k: array for k, array in self.new.arrays.items() if array.shape[:1] == (*n,)}
        if any(dim in self.new.of_fit for k in by_row for dim in self.new.dims(k)):  # as many levels as rows
            return None
        model, [(name, values)] = self._posterior.density.given, self.observed.items()
        given = {k: np.asarray(v)[which] for k, v in by_row.items()} | self.new.labels
        given |= {k: v for k, v in self.new.arrays.items() if k not in by_row}
        given |= {} if data_behind(model, model[name]) else {name: values[which]}
        try:
            few = NewRows(self._posterior, given)
            free = self.free(self.point)
            is_same = np.array_equal(
                few.logp(few.known(free, self.some)), self.logp(self.known(free, self.some))[:, which]
            )
        except ValueError:
            return None
        return few if is_same else None

    def _check_priors(self) -> None:
        """Raise ValueError where new data change log p of what was in the fit: that is no matter of new rows."""
        model = self._graph.model
        for potential in model.potentials:
            if self._graph.depends_on_new(potential):
                raise ValueError(f"The Potential {potential.name!r} depends on the new data: fit again with all rows.")
        for variable in self._names:
            for name in self.new.arrays:
                if self._graph.prior_reads(model[variable], name) and not self.new.goes_on(name):
                    raise ValueError(
                        f"The prior of {variable!r} depends on {name!r}, which is not what it was in the fit: give the "
                        "same values for what was in it, or fit again."
                    )

    @property
    def n_rows(self) -> int:
        """Number of new observations."""
        return sum(values.size for values in self.observed.values())

    def _is_complete(self, name: str) -> bool:
        """Tell whether all data that a variable is computed from are those of the new rows, or of all rows."""
        try:
            self.new.check_complete(self._graph.data_needed([name]))
        except ValueError:
            return False
        return True

    def look_at(self, theta: Array) -> None:
        """Look at a draw of the posterior from now on: elsewhere, a coefficient may be 0, and hide things."""
        self.point = theta[None]

    def free(self, theta: Array) -> dict[str, AnyArray]:
        """Return the free variables on their constrained scale, as they are in the fit, (n, *shape)."""
        return self._free(theta)

    def labels(self, name: str, axis: int) -> object:
        """Return what tells new elements along an axis from others: the same for the variables of a group."""
        return self.new.dims(name)[axis] or (name, axis)

    # --- elements that were not in the fit ---

    def known(self, free: Values, drawn: Values) -> dict[str, AnyArray]:
        """Return the variables that the rows depend on, with elements that were not in the fit from ``drawn``."""
        found = {}
        for name in self._names:
            old = self._old(name, free)
            if name in drawn:
                of_name = np.broadcast_to(drawn[name], (length_of(free), *drawn[name].shape[1:]))
                old = of_name if old is None else np.where(self.is_new[name], of_name, old)
            assert old is not None
            found[name] = old
        return found

    def drawn(self, free: Values, random_seed: int) -> dict[str, AnyArray]:
        """Return the variables that have grown, with draws of their new elements from their prior given all others."""
        if not self.grown:
            return {}
        function, names = self._prior
        function.reseed(random_seed)
        packed = _packed([self._old(name, free) for name in names], length_of(free))
        return dict(zip(self.grown, self._told(lambda: function(packed)), strict=True))

    @cached_property
    def some(self) -> dict[str, AnyArray]:
        """Return one draw of the variables that have grown, (1, *shape)."""
        return self.drawn(self.free(self.point), 0)

    @cached_property
    def is_new(self) -> dict[str, NDArray[np.bool_]]:
        """Tell which elements of the variables that have grown were not in the fit: those that draws differ in."""
        free = self.free(self.point)
        first, second = (self.drawn(free, seed) for seed in (0, 1))
        return {name: (first[name] != second[name])[0] for name in self.grown}

    def is_continued(self, name: str) -> bool:
        """Tell whether the new elements of a variable go on from those of the fit."""
        return self._treatments[name].n_known is not None

    # --- what depends on them ---

    def logp(self, known: Values) -> Array:
        """Return the log densities of the new rows, (n, n_rows), given the variables that they depend on."""
        function = self._log_densities
        packed = _packed([known[name] for name in self._names], length_of(known))
        values = self._told(lambda: function(packed))
        for (name, rows), of_name in zip(self.observed.items(), values, strict=True):
            if of_name.shape[1:] != rows.shape:
                raise ValueError(
                    f"{name!r} has new values of shape {rows.shape}, and with the other new data it has shape "
                    f"{of_name.shape[1:]}: give the same rows of all."
                )
        return np.concatenate([np.asarray(v, dtype=np.float64).reshape(len(packed), -1) for v in values], axis=1)

    @property
    def has_elementwise_priors(self) -> bool:
        """Whether elements of the variables that have grown have log densities of their own."""
        model = self._graph.model
        return not any(self.is_continued(name) or model[name].owner.op.ndim_supp for name in self.grown)

    @property
    def is_free(self) -> bool:
        """Whether new elements have log densities of their own, and may have any values."""
        model = self._graph.model
        return self.has_elementwise_priors and all(
            model.rvs_to_transforms.get(model[name]) is None for name in self.grown
        )

    def prior_logp(self, known: Values) -> dict[str, Array]:
        """Return the log densities of the elements of variables that have grown, (n, *shape), given all else."""
        function, names = self._prior_densities
        packed = _packed([known[name] for name in names], length_of(known))
        return dict(zip(self.grown, self._told(lambda: function(packed)), strict=True))

    @cached_property
    def _prior_densities(self) -> tuple[OnDraws, list[str]]:
        known = self.known(self.free(self.point), self.some)
        return self._told(lambda: self._compiled(lambda ts: self._graph.prior_log_densities(self.grown, ts, 1), known))

    def values(self, names: Sequence[str], known: Values) -> dict[str, AnyArray]:
        """Return Deterministics, (n, *shape), given the new rows and the variables that these depend on."""
        function, order = self._told(lambda: self._compiled(lambda ts: self._graph.compiled(names, ts, 1), known))
        packed = _packed([known[name] for name in order], length_of(known))
        return dict(zip(names, self._told(lambda: function(packed)), strict=True))

    @property
    def _names(self) -> list[str]:
        return [name for name in self._treatments if name not in self.observed]

    def _old(self, name: str, free: Values) -> AnyArray | None:
        """Return a variable with the elements of the fit where these are now; None where it has none of them."""
        numbers = self._treatments[name].known
        if numbers is None:
            return None
        if self._of_last[0] is not free:  # asked for again with each candidate
            self._of_last = free, {}
        if name not in self._of_last[1]:
            self._of_last[1][name] = free[name].reshape(length_of(free), -1)[:, numbers[0].astype(np.intp)]
        return self._of_last[1][name]

    @cached_property
    def _prior(self) -> tuple[OnDraws, list[str]]:
        free = self.free(self.point)
        old = {name: values for name in self._names if (values := self._old(name, free)) is not None}
        return self._told(lambda: self._compiled(lambda ts: self._graph.compiled(self.grown, ts, 1), old, whole=False))

    @cached_property
    def _log_densities(self) -> OnDraws:
        known = self.known(self.free(self.point), self.some)  # may say what is wrong
        return self._told(lambda: self._compiled(lambda ts: self._graph.log_densities(self.observed, ts, 1), known))[0]

    def _compiled(
        self,
        compiled: Callable[[dict[str, Treatment]], tuple[OnDraws, Array]],
        values: Values,
        *,
        whole: bool = True,
    ) -> tuple[OnDraws, list[str]]:
        """Return a function of variables of these values' shapes, and their names in its order."""
        treatments = {}
        for name, t in self._treatments.items():
            if name in self.observed:
                treatments[name] = t
            else:
                of_name = values[name][:1] if name in values else None
                treatments[name] = Treatment(known=of_name) if whole else replace(t, known=of_name)
        return compiled(treatments)[0], [name for name in self._names if name in values]

    def _told[T](self, do: Callable[[], T]) -> T:
        """Do something with the model given the new rows; raise ValueError where it can't be done."""
        return given_new_data(do, self.new, self.data)


def _has_grown(treatment: Treatment) -> bool:
    return treatment.known is None or treatment.mask is not None or treatment.n_known is not None


def length_of(values: Values) -> int:
    """Return the number of draws."""
    return len(next(iter(values.values())))


def _packed(arrays: Sequence[AnyArray | None], n: int) -> Array:
    """Return arrays, (n, ...) each, side by side, behind the number that `PredictiveGraph` puts before them."""
    there = [np.asarray(a, dtype=np.float64).reshape(n, -1) for a in arrays if a is not None]
    return np.concatenate([np.zeros((n, 1)), *there], axis=1)


# --- what was given ---


def _split(model: pm.Model, given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return new observations by the name of the variable, None where data of the model hold them, and these data."""
    if hasattr(given, "columns"):
        raise TypeError("new_data should be a dict of arrays by name, such as {name: frame[name]}; got a DataFrame.")
    if not isinstance(given, Mapping):
        raise TypeError(f"new_data should be a dict of arrays by name; got {shortened(given)}.")
    observed, rest = {}, dict(given)
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


def _checked(rv: Any, values: Any) -> AnyArray:
    """Return new values of an observed variable."""
    if rv.owner.op.ndim_supp:
        raise ValueError(
            f"The elements of {rv.name!r} have one distribution together: new ones can't be put beside those of the "
            "fit. Fit again with all of them."
        )
    try:
        array = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan)
    except (ValueError, TypeError):
        raise ValueError(f"{rv.name!r} should be numbers in an array; got {shortened(values)}.") from None
    if array.ndim != rv.type.ndim:
        raise ValueError(f"{rv.name!r} has shape {array.shape}; in the model it has {rv.type.ndim} axes.")
    if np.isnan(array).any():
        raise ValueError(f"{rv.name!r} has missing values: leave these rows out.")
    if not array.size:
        raise ValueError(f"{rv.name!r} has no new rows.")
    if np.dtype(rv.type.dtype).kind in "iu" and not np.array_equal(array, np.round(array)):
        raise ValueError(f"{rv.name!r} should be whole numbers, as in the model; got {shortened(values)}.")
    return array.astype(rv.type.dtype)
