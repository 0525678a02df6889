"""Modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor."""

import math

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, combinations, islice

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.results.distributions import Distribution

# Symmetries that log p may have: exchanged labels and changed signs, proposed from the shapes of variables alone.
# All are linear maps of the unconstrained space that keep volumes, so that they leave the posterior as it is just where
# they leave log p as it is.

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
    """An axis of a variable along which entries could be exchanged."""

    variable: Variable
    axis: int
    #: Constrained.
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
    """Two labels exchanged along some axes, or variables that are pairs by name; signs that change with them."""

    axes: tuple[Axis, ...] = ()
    labels: tuple[int, int] = (0, 1)
    pairs: tuple[tuple[Variable, Variable], ...] = ()
    #: Probabilities of the two labels, unconstrained.
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
    """Symmetries of one kind: of the labels along an axis, of the signs by label."""

    kind: str
    #: Of the variables.
    names: tuple[str, ...]
    #: Axes, pairs or variables that are part of it.
    where: frozenset[object]
    #: Exchanges of neighbours, in the order of the labels; signs label by label.
    members: tuple[Exchange | Flip, ...]
    #: Along the axis; 0 for whole variables.
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
    # Scalars between bounds: the probability of a label turns to that of the other one.
    kinds = ("logodds", "interval") if length == 2 else ()
    scalars = tuple(v for v in layout.variables if not v.shape and transform_of(v) in kinds)
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


# --- modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor ---

#: Draws at which log p is compared, and evaluations of log p at most.
N_DRAWS, MOST_EVALUATIONS = 8, 512
#: Rounding of log p, relative: far above that of sums of a million terms, far below any change that data make.
_ROUNDING = 1e-9
#: Log of the ratio of densities from which on an image of a draw is outside q, and the part of them that has to be: as
#: for other modes (`elsewhere`).
_LOG_OUTSIDE, _MOSTLY = 3.0, 0.5


@dataclass(frozen=True)
class EqualModes:
    """A symmetry of log p that q does not have."""

    kind: str
    #: Variables whose entries are exchanged, or change signs, together.
    names: tuple[str, ...]
    #: Of equal modes that it makes.
    number: int
    #: Whether signs change for each label along an axis on its own.
    by_label: bool = False
    #: How many of these modes q covers; "some": there may be more of them.
    covered: str = "one"


def equal_modes(
    density: ModelDensity, q: Distribution, theta: Array, layout: Layout, most: int = MOST_EVALUATIONS
) -> tuple[tuple[EqualModes, ...], int]:
    """Return the symmetries of log p that map q to somewhere else, and how many evaluations of log p that took.

    A symmetry leaves log p as it is at each draw, not only in the mean; a single draw rules out almost all candidates.
    """
    comparison = _Comparison(density, q, theta, most)
    if comparison.log_q is None:
        return (), 0
    families = families_of(layout) if len(comparison.theta) else []
    ends = [(family, member) for family in families for member in _ends(family)]
    holds = comparison.hold_at_one([member for _, member in ends])
    promising = {id(family) for (family, _), held in zip(ends, holds, strict=True) if held}
    kept: list[tuple[SymmetryFamily, list[_Image]]] = []
    for family in families:
        if id(family) in promising and _is_new(family, kept):
            kept.append((family, [comparison.image(member) for member in family.members]))
    return tuple(_counted(kept, layout.n_dim)), comparison.n_log_p


def _ends(family: SymmetryFamily) -> list[Exchange | Flip]:
    """Return the first and the last of a family, which stand for all of it."""
    return list(dict.fromkeys((family.members[0], family.members[-1])))


class _Image(Enum):
    """Where a candidate maps q: into itself, elsewhere, or elsewhere and it is a symmetry of log p."""

    SAME, OTHER, MISSED = range(3)


def _is_new(family: SymmetryFamily, known: list[tuple[SymmetryFamily, list[_Image]]]) -> bool:
    """Tell whether exchanged labels add to those found: otherwise those of fewer variables are a part of them."""
    missed = [other for other, images in known if other.kind == "labels" and _Image.MISSED in images]
    return family.kind == "sign" or not any(family.where & other.where for other in missed)


class _Comparison:
    """log p at draws and at their images, within a number of evaluations."""

    def __init__(self, density: ModelDensity, q: Distribution, theta: Array, most: int) -> None:
        self.density, self.q, self.left, self.n_log_p = density, q, most, 0
        theta = theta[np.isfinite(theta).all(axis=1)]
        logp = self._log_p(theta)
        self.theta, self.logp = theta[np.isfinite(logp)], logp[np.isfinite(logp)]
        self.log_q = q.rough_log_density(self.theta) if len(self.theta) else np.empty(0)

    def _log_p(self, theta: Array) -> Array:
        self.left -= len(theta)
        self.n_log_p += len(theta)
        return self.density.logp(theta) if len(theta) else np.empty(0)

    def hold_at_one(self, members: list[Exchange | Flip]) -> list[bool]:
        """Tell which candidates leave log p as it is at the first draw; False of those beyond the number."""
        result: list[bool] = []
        affordable, size = members[: self.left], max(1, STREAMED // max(self.theta.shape[1], 1))
        for some in (affordable[i : i + size] for i in range(0, len(affordable), size)):
            logp = self._log_p(np.concatenate([member(self.theta[:1]) for member in some]))
            result += _equal(logp, self.logp[0]).tolist()
        return result + [False] * (len(members) - len(result))

    def image(self, member: Exchange | Flip) -> _Image:
        """Tell where a candidate maps most of q, and whether it is a symmetry if that is elsewhere."""
        theta = member(self.theta)
        log_q = self.q.rough_log_density(theta)
        assert self.log_q is not None
        assert log_q is not None
        with np.errstate(invalid="ignore", over="ignore"):
            outside = ~(self.log_q - log_q <= _LOG_OUTSIDE)
        if outside.mean() <= _MOSTLY:
            return _Image.SAME
        holds = len(theta) <= self.left and _equal(self._log_p(theta), self.logp).all()
        return _Image.MISSED if holds else _Image.OTHER


def _equal(one: Array, other: Array | float) -> NDArray[np.bool_]:
    return np.abs(one - other) <= _ROUNDING * (1.0 + np.abs(other))


def _counted(kept: list[tuple[SymmetryFamily, list[_Image]]], n_dim: int) -> list[EqualModes]:
    """Return how many equal modes each symmetry makes; signs that follow from others, or that q has, make none."""
    result, basis = [], set[int]()

    def add(family: SymmetryFamily, images: list[_Image], which: _Image) -> int:
        before = len(basis)
        for member in (m for m, image in zip(family.members, images, strict=True) if image is which):
            _add_signs(basis, member(np.ones((1, n_dim)))[0] < 0.0)
        return len(basis) - before

    for family, images in kept:
        if family.kind == "sign":
            add(family, images, _Image.SAME)
    for family, images in kept:
        number = _orders(images) if family.kind == "labels" else 2 ** add(family, images, _Image.MISSED)
        if number > 1:
            by_label = family.kind == "sign" and family.n_labels > 0
            result.append(EqualModes(family.kind, family.names, number, by_label))
    return result


def _add_signs(basis: set[int], negative: NDArray[np.bool_]) -> None:
    """Add a set of coordinates that change signs to a basis of such sets, unless it is a product of those there."""
    bits = int.from_bytes(np.packbits(negative).tobytes())
    for other in sorted(basis, reverse=True):
        bits = min(bits, bits ^ other)
    if bits:
        basis.add(bits)


def _orders(images: list[_Image]) -> int:
    """Return in how many orders labels can be put of which some neighbours can be exchanged."""
    runs = "".join("x" if image is _Image.MISSED else " " for image in images).split()
    return math.prod(math.factorial(len(run) + 1) for run in runs)
