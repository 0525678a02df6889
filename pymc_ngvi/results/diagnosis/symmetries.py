"""Symmetries that log p may have: exchanged labels and changed signs, proposed from the shapes of variables alone.

All are linear maps of the unconstrained space that keep volumes, so that they leave the posterior as it is just where
they leave log p as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.graphs.layout import Variable

#: Transforms that act entry by entry; those of them that turn a sign on a symmetric support to one here.
_ENTRYWISE = ("", "log", "log_exp_m1", "logodds", "interval", "circular")
_MIRRORED = ("", "logodds", "interval", "zerosum")
#: Sets of up to so many axes or variables are all tried; of more, small ones, so many in all.
_MOST_IN_ALL_SETS, _MOST_SETS = 5, 64
#: Labels along an axis that are looked at.
_MOST_LABELS = 9
#: Characters in which the names of two variables may differ that are exchanged (``mu_a`` and ``mu_b``).
_MOST_APART = 2


def transform_of(variable: Variable) -> str:
    """Return the name of the transform of a variable; empty where it has none."""
    if variable.value_name == variable.name:
        return ""
    return variable.value_name.removeprefix(f"{variable.name}_").removesuffix("__")


@dataclass(frozen=True)
class Axis:
    """An axis of a variable along which entries could be exchanged.

    Parameters
    ----------
    variable : Variable
    axis : int
    length : int
        Constrained.
    """

    variable: Variable
    axis: int
    length: int

    def exchange(self, theta: Array, i: int, j: int) -> None:
        """Exchange two entries in draws, in place.

        A simplex is made of centred logarithms; the last of them is implied.
        """
        values = _values(theta, self.variable).swapaxes(1, self.axis + 1)
        if j < values.shape[1]:
            values[:, [i, j]] = values[:, [j, i]]
        else:
            values[:, i] = -values.sum(axis=1)


@dataclass(frozen=True)
class Exchange:
    """Two labels exchanged along some axes, or variables exchanged that are pairs by name; signs that change with them.

    Parameters
    ----------
    axes : tuple of Axis
    labels : tuple of int
    pairs : tuple of tuple of Variable
    mirrored : tuple of Variable
        Probabilities of the two labels, unconstrained.
    """

    axes: tuple[Axis, ...] = ()
    labels: tuple[int, int] = (0, 1)
    pairs: tuple[tuple[Variable, Variable], ...] = ()
    mirrored: tuple[Variable, ...] = ()

    def __call__(self, theta: Array) -> Array:
        """Return the images of draws, (n_draws, n_dim)."""
        result = theta.copy()
        for axis in self.axes:
            axis.exchange(result, *self.labels)
        for one, other in self.pairs:
            result[:, one.where], result[:, other.where] = theta[:, other.where], theta[:, one.where]
        for variable in self.mirrored:
            result[:, variable.where] *= -1.0
        return result


@dataclass(frozen=True)
class Flip:
    """Signs changed of whole variables, or of one entry along some axes."""

    variables: tuple[Variable, ...] = ()
    axes: tuple[Axis, ...] = ()
    label: int = 0

    def __call__(self, theta: Array) -> Array:
        """Return the images of draws, (n_draws, n_dim)."""
        result = theta.copy()
        for variable in self.variables:
            result[:, variable.where] *= -1.0
        for axis in self.axes:
            _values(result, axis.variable).swapaxes(1, axis.axis + 1)[:, self.label] *= -1.0
        return result


@dataclass(frozen=True)
class SymmetryFamily:
    """Symmetries of one kind: of the labels along an axis, of the signs by label.

    Parameters
    ----------
    kind : {"labels", "sign"}
    names : tuple of str
        Of the variables.
    where : frozenset
        Axes, pairs or variables that are part of it.
    members : tuple of Exchange or of Flip
        Exchanges of neighbours, in the order of the labels; signs label by label.
    n_labels : int
        Along the axis; 0 for whole variables.
    """

    kind: str
    names: tuple[str, ...]
    where: frozenset[object]
    members: tuple[Exchange | Flip, ...]
    n_labels: int = 0


def families_of(layout: Layout) -> list[SymmetryFamily]:
    """Return all symmetries to try, those of few variables first."""
    axes = _axes_by_length(layout)
    found = [
        *_label_families(layout, axes),
        *_twin_families(layout),
        *_sign_by_label_families(axes),  # those of whole variables may be products of these
        *_sign_families(layout),
    ]
    return sorted(found, key=lambda family: len(family.where))


def _values(theta: Array, variable: Variable) -> Array:
    """Return a view of the values of a variable in draws, (n_draws, *shape): an axis that is split is never copied."""
    return theta[:, variable.where].reshape(len(theta), *variable.shape)


def _axes_by_length(layout: Layout) -> dict[int, list[Axis]]:
    """Return the axes along which entries could be exchanged, by constrained length."""
    result: dict[int, list[Axis]] = {}
    for variable in layout.variables:
        transform, last = transform_of(variable), len(variable.shape) - 1
        for axis, size in enumerate(variable.shape):
            implied = transform == "simplex" and axis == last
            if (transform in _ENTRYWISE or transform == "simplex") and size + implied > 1:
                result.setdefault(size + implied, []).append(Axis(variable, axis, size + implied))
    return result


def _sets[T](items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Return sets of items: all of them at once where they are many, then small ones first."""
    n = len(items)
    if n > _MOST_IN_ALL_SETS:
        yield tuple(items)
    yield from islice(chain.from_iterable(combinations(items, size) for size in range(1, n + 1)), _MOST_SETS)


def _names(variables: Sequence[Variable]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.name for v in variables))


def _probabilities(layout: Layout) -> tuple[Variable, ...]:
    """Return scalars between bounds: that of a label turns to that of the other one where two are exchanged."""
    return tuple(v for v in layout.variables if not v.shape and transform_of(v) in ("logodds", "interval"))


def _label_families(layout: Layout, axes: dict[int, list[Axis]]) -> list[SymmetryFamily]:
    result = []
    for length, those in axes.items():
        for some in _sets(those):
            for mirrored in _mirrored_with(layout, length):
                members = tuple(
                    Exchange(some, (i, i + 1), mirrored=mirrored) for i in range(min(length, _MOST_LABELS) - 1)
                )
                names = _names([*(axis.variable for axis in some), *mirrored])
                result.append(SymmetryFamily("labels", names, frozenset([*some, *mirrored]), members, length))
    return result


def _mirrored_with(layout: Layout, length: int) -> list[tuple[Variable, ...]]:
    """Return what may change signs as two labels of so many are exchanged."""
    scalars = _probabilities(layout) if length == 2 else ()
    return list(dict.fromkeys([(), scalars, *((v,) for v in scalars[:_MOST_IN_ALL_SETS])]))


def _twin_families(layout: Layout) -> list[SymmetryFamily]:
    """Return exchanges of variables whose names differ in a character or two, as ``mu_a`` and ``mu_b`` do."""
    alike: dict[tuple[str, str], list[tuple[Variable, Variable]]] = {}
    for one, other in combinations(layout.variables[:_MOST_SETS], 2):
        apart = _apart(one.name, other.name)
        if apart and one.shape == other.shape and transform_of(one) == transform_of(other):
            alike.setdefault(apart, []).append((one, other))
    result = []
    for pairs in alike.values():
        for some in _sets(pairs):
            for mirrored in _mirrored_with(layout, 2):
                names = _names([*(v for pair in some for v in pair), *mirrored])
                members = (Exchange(pairs=some, mirrored=mirrored),)
                result.append(SymmetryFamily("labels", names, frozenset([*some, *mirrored]), members))
    return result


def _apart(one: str, other: str) -> tuple[str, str] | None:
    """Return in what two names differ, if that is little beside what they share."""
    n = min(len(one), len(other))
    head = next((i for i in range(n) if one[i] != other[i]), n)
    tail = next((i for i in range(n - head) if one[-1 - i] != other[-1 - i]), n - head)
    first, second = one[head : len(one) - tail], other[head : len(other) - tail]
    short = max(len(first), len(second)) <= _MOST_APART and head + tail > 0
    return (first, second) if short else None


def _sign_families(layout: Layout) -> list[SymmetryFamily]:
    """Return changes of the signs of whole variables."""
    real = [v for v in layout.variables if transform_of(v) in _MIRRORED]
    return [SymmetryFamily("sign", _names(some), frozenset(some), (Flip(some),)) for some in _sets(real)]


def _sign_by_label_families(axes: dict[int, list[Axis]]) -> list[SymmetryFamily]:
    """Return changes of signs at one label of an axis."""
    result = []
    for length, those in axes.items():
        for some in _sets([axis for axis in those if transform_of(axis.variable) in _MIRRORED]):
            members = tuple(Flip(axes=some, label=i) for i in range(min(length, _MOST_LABELS)))
            names = _names([axis.variable for axis in some])
            result.append(SymmetryFamily("sign", names, frozenset(some), members, length))
    return result
