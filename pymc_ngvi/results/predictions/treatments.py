"""What becomes of each random variable of a model in predictions: what is known of it, and how the rest is had."""

import warnings

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.predictive import PredictiveGraph, Treatment, is_continued, n_batch_axes
from pymc_ngvi.reading.roles import uncoupled_axes
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.predictions.new_data import NewData, listed

Groups = Literal["known", "new", "average"]


@dataclass(frozen=True)
class _Axis:
    """Where the elements of an axis were in the fit: their positions then, -1 for new ones."""

    positions: NDArray[np.intp]
    n_old: int
    labels: list[Any] | None

    @property
    def new(self) -> list[Any]:
        """Labels of the elements that were not in the fit, or their positions."""
        places = np.flatnonzero(self.positions < 0)
        return places.tolist() if self.labels is None else [self.labels[i] for i in places]

    @property
    def goes_on(self) -> bool:
        """Whether the elements of the fit come first, all of them, and in order."""
        first = self.positions[: self.n_old]
        return len(first) == self.n_old and bool((first == np.arange(self.n_old)).all())


@dataclass
class Treatments:
    """Decides on the treatment of random variables."""

    posterior: Posterior
    graph: PredictiveGraph
    new: NewData
    groups: Groups
    #: The free variables that are effects of groups; read with ``groups="average"`` alone.
    effects: frozenset[str]
    #: Of the free variables of the fit, (n_draws, *shape), constrained.
    draws: Mapping[str, AnyArray]
    #: Values of observed variables, where all are there.
    observed: Mapping[str, AnyArray]
    drawn: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)

    def of(self, needed: Sequence[Any]) -> dict[str, Treatment]:
        """Return the treatment of the random variables that are not just drawn given their parents."""
        shapes = dict(zip([rv.name for rv in needed], self.graph.shapes(needed), strict=True))
        found = {}
        for rv in needed:
            if rv.name in self.draws:
                found[rv.name] = self._free(rv, shapes[rv.name])
            elif rv in self.graph.model.observed_RVs:
                found[rv.name] = self._observed(rv, shapes[rv.name])
        self._warn_of_potentials()
        return found

    @property
    def attrs(self) -> dict[str, str]:
        """What was done with effects of groups, for the attributes of predictions."""
        named = {"drawn_from_prior": self.drawn, "averaged": self.averaged}
        return {"groups": self.groups, **{key: ", ".join(names) for key, names in named.items() if names}}

    def _free(self, rv: Any, shape: tuple[int, ...]) -> Treatment:
        draws = self.draws[rv.name]
        if self.groups == "average" and rv.name in self.effects:
            self.averaged.append(rv.name)
            return Treatment(mean=True)
        axes = self._changed(rv, draws.shape[1:], shape)
        if not axes:
            return Treatment(known=draws)
        n_batch, n_known, mask = n_batch_axes(rv), None, np.ones((1,) * len(shape), dtype=bool)
        self._check_processes(rv, axes)
        for number, axis in axes.items():
            if not axis.new:
                continue
            if number < n_batch:
                if self.groups == "known":
                    raise ValueError(self._unknown(rv, number, axis))
                along = [1] * len(shape)
                along[number] = -1
                mask = mask & (axis.positions >= 0).reshape(along)
            elif is_continued(rv, number):
                n_known = axis.n_old
            else:
                raise ValueError(
                    f"{rv.name!r} has new elements, {listed(axis.new)}, along {self._axis(rv, number)}, where elements "
                    f"have one distribution together ({type(rv.owner.op).__name__}): what some are given the others "
                    "can't be told."
                )
        known = draws
        for number, axis in axes.items():
            known = np.take(known, np.maximum(axis.positions, 0), axis=number + 1)
        if not mask.all():
            self._check_order(rv, axes)
            (self.averaged if self.groups == "average" else self.drawn).append(rv.name)
        return Treatment(
            known=known if mask.any() else None,
            mask=None if mask.all() or not mask.any() else mask,
            n_known=n_known if mask.any() else None,
            mean=self.groups == "average" and not mask.all(),
        )

    def _observed(self, rv: Any, shape: tuple[int, ...]) -> Treatment:
        """Return the treatment of an observed variable: its length, and whether it goes on from what was observed."""
        [old] = self.graph.shapes([rv], new=False)
        n_batch = n_batch_axes(rv)
        size = tuple(self._length(rv, axis, old[axis], shape[axis]) for axis in range(n_batch))
        resized = None if size == shape[:n_batch] else size
        if n_batch < len(shape) and is_continued(rv, n_batch):
            axes = self._changed(rv, old, (*size, *shape[n_batch:]))
            if n_batch in axes:
                if not axes[n_batch].goes_on:
                    raise ValueError(self._should_go_on(rv, n_batch))
                if rv.name not in self.observed:
                    raise ValueError(f"{rv.name!r} has missing values: how it goes on from them can't be told.")
                return Treatment(known=_padded(self.observed[rv.name], shape)[None], n_known=old[n_batch], size=resized)
        return Treatment(size=resized)

    def _length(self, rv: Any, axis: int, old: int, now: int) -> int:
        """Return the new length of an axis of an observed variable, which may be that of its data."""
        dim = self.new.dims(rv.name)[axis]
        if dim is not None and dim in self.new.lengths:
            return self.new.lengths[dim]
        lengths = self.new.rows.get(old, set()) if now == old and self.graph.depends_on_new(rv) else set()
        if len(lengths) > 1:
            raise ValueError(
                f"The new length of {rv.name!r} can't be told: data that had its length, {old:,}, have "
                f"{', '.join(f'{n:,}' for n in sorted(lengths))} now. Give these, and {rv.name!r}, a dim."
            )
        return lengths.pop() if lengths else now

    # --- axes ---

    def _changed(self, rv: Any, old: tuple[int, ...], shape: tuple[int, ...]) -> dict[int, _Axis]:
        """Return the axes of a variable that do not have the elements that they had."""
        if len(old) != len(shape):
            raise ValueError(f"{rv.name!r} had shape {old} in the fit, and has {shape} given the new data.")
        found = {}
        for number, (before, now) in enumerate(zip(old, shape, strict=True)):
            axis = self._axis_of(rv, number, before, now)
            if len(axis.positions) != before or not axis.goes_on:
                found[number] = axis
        return found

    def _axis_of(self, rv: Any, number: int, before: int, now: int) -> _Axis:
        dim = self.new.dims(rv.name)[number]
        if dim is not None and dim in self.new.labels and dim in self.new.of_fit:
            place = {label: i for i, label in enumerate(self.new.of_fit[dim])}
            labels = self.new.labels[dim]
            return _Axis(np.array([place.get(label, -1) for label in labels], dtype=np.intp), before, labels)
        if dim is not None and dim in self.new.of_fit and now != before:
            raise ValueError(
                f"Dim {dim!r} of {rv.name!r} had {before:,} levels in the fit, and the new data have {now:,}: give the "
                f"labels of all levels, as {dim!r}, to tell which of them these are."
            )
        by_rows = rv.name in self.draws and self.graph.is_by_rows(rv)
        named = [] if dim is None or dim in self.new.of_fit else self.new.along(dim)
        arrays = named or [
            (name, axis)
            for name, array in self.new.arrays.items()
            if by_rows or (dim is None and self.graph.prior_depends_on(rv, name))
            for axis in range(array.ndim)
            if (self.new.before(name).shape[axis], array.shape[axis]) == (before, now)
        ]
        same = min(before, now) if all(self._begins_as_before(*place) for place in arrays) else 0
        positions = np.full(now, -1, dtype=np.intp)
        positions[:same] = np.arange(same)
        return _Axis(positions, before, None)

    def _begins_as_before(self, name: str, axis: int) -> bool:
        """Tell whether new data begin with those of the fit, or are the first of them, along an axis."""
        old, new = self.new.before(name), self.new.arrays[name]
        n = min(old.shape[axis], new.shape[axis])
        return bool(np.array_equal(np.take(old, np.arange(n), axis), np.take(new, np.arange(n), axis)))

    def _check_processes(self, rv: Any, axes: Mapping[int, _Axis]) -> None:
        """Raise ValueError where elements that depend on each other are not all there, those of the fit first."""
        [place] = [v for v in self.posterior.layout.variables if v.name == rv.name]
        pattern, summed = self.posterior.density.structural_pattern, self.posterior.density.summed
        pattern = summed.among if pattern is None and summed is not None else pattern
        apart: tuple[int, ...] = ()
        if pattern is not None and len(place.shape) == rv.type.ndim:
            apart = uncoupled_axes(place, pattern)
        for number, axis in axes.items():
            if axis.goes_on or axis.n_old < 2 or number in apart:
                continue
            if number < n_batch_axes(rv) or (axis.new and is_continued(rv, number)):
                raise ValueError(self._should_go_on(rv, number))

    def _check_order(self, rv: Any, axes: Mapping[int, _Axis]) -> None:
        """Raise ValueError for new elements of what a transform ties together, as the order of cutpoints does."""
        transform = self.graph.model.rvs_to_transforms.get(rv)
        tied = rv.type.ndim - (getattr(transform, "ndim_supp", 0) or 0)
        for number, axis in axes.items():
            if axis.new and number >= tied:
                raise ValueError(
                    f"{rv.name!r} has new elements, {listed(axis.new)}, along {self._axis(rv, number)}, where elements "
                    f"are tied together ({type(transform).__name__}): what some are given the others can't be told."
                )

    # --- messages ---

    def _axis(self, rv: Any, number: int) -> str:
        dim = self.new.dims(rv.name)[number]
        return f"axis {number}" if dim is None else f"dim {dim!r}"

    def _unknown(self, rv: Any, number: int, axis: _Axis) -> str:
        what = "levels" if axis.labels is not None else "elements, at"
        return (
            f"{rv.name!r} has {what} {listed(axis.new)} along {self._axis(rv, number)} that were not in the fit. "
            "groups='new' draws them from their prior given the other parameters; groups='average' takes the mean of "
            "that prior."
        )

    def _should_go_on(self, rv: Any, number: int) -> str:
        return (
            f"Elements of {rv.name!r} along {self._axis(rv, number)} depend on each other, as those of a walk or a "
            "process do, and new ones depend on those of the fit: give data and labels of all elements, those of the "
            "fit first, as they were."
        )

    def _warn_of_potentials(self) -> None:
        """Warn where a Potential may say something of elements that are drawn from their prior."""
        model = self.graph.model
        said = sorted(name for name in self.drawn if self.graph.is_in_potential(model[name]))
        if said:
            warnings.warn(
                f"New elements of {quoted(said)} are drawn without regard to the Potentials that depend on these.",
                UserWarning,
                skip_file_prefixes=OURS,
            )


def _padded(values: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Return values at the start of an array of a larger shape."""
    whole = np.zeros(shape)
    whole[tuple(slice(n) for n in values.shape)] = values
    return whole
