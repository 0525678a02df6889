"""Modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor."""

import math

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, combinations, islice
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.fitting.record import LOG_OUTSIDE, MOSTLY
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


class _Item(NamedTuple):
    """What can be exchanged label by label, or change its sign: an axis of a variable, or two variables."""

    variables: tuple[Variable, ...]
    axis: int
    #: Places of each label in the flat vector; shape (n_labels, ...).
    places: NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Symmetry:
    """Places exchanged, and signs changed, in draws.

    A simplex is made of centred logarithms, of which the last is implied by the others: places behind the flat vector
    are such sums, with the opposite sign.
    """

    exchanged: tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]
    mirrored: tuple[NDArray[np.intp], ...]
    #: What is summed for the places that are implied, (n_summed, n_places) each.
    sums: tuple[NDArray[np.intp], ...]

    def __call__(self, theta: Array) -> Array:
        """Return the images of draws, (n_draws, n_dim)."""
        result = np.concatenate([theta, *(-theta[:, at].sum(axis=1) for at in self.sums)], axis=1)
        for one, other in self.exchanged:
            result[:, one], result[:, other] = result[:, other].copy(), result[:, one].copy()
        for at in self.mirrored:
            result[:, at] *= -1.0
        return result[:, : theta.shape[1]]


@dataclass(frozen=True)
class SymmetryFamily:
    """Symmetries of one kind: of the labels along an axis, of the signs by label."""

    kind: str
    #: Of the variables.
    names: tuple[str, ...]
    #: Axes, pairs or variables that are part of it.
    where: frozenset[object]
    #: Exchanges of neighbours, in the order of the labels; signs label by label.
    members: tuple[Symmetry, ...]


def families_of(layout: Layout) -> list[SymmetryFamily]:
    """Return all symmetries to try, those of few variables first."""
    axes, sums = _axes_by_length(layout)
    flat = np.arange(layout.n_dim)

    def family(kind: str, some: Sequence[_Item], mirrored: Sequence[Variable] = ()) -> SymmetryFamily:
        labels, members = range(min(len(some[0].places), _MOST_LABELS)), []
        for i in labels if kind == "sign" else labels[:-1]:
            exchanged = tuple((item.places[i], item.places[i + 1]) for item in some if kind == "labels")
            signs = tuple(item.places[i] for item in some if kind == "sign")
            members.append(Symmetry(exchanged, (*signs, *(flat[v.where] for v in mirrored)), sums))
        names = dict.fromkeys(v.name for v in (*(v for item in some for v in item.variables), *mirrored))
        where = frozenset([*((item.variables, item.axis) for item in some), *mirrored])
        return SymmetryFamily(kind, tuple(names), where, tuple(members))

    # Scalars between bounds: as two labels are exchanged, the probability of one turns to that of the other.
    bounded = tuple(v for v in layout.variables if not v.shape and transform_of(v) in ("logodds", "interval"))
    mirrors = list(dict.fromkeys([(), bounded, *((v,) for v in bounded[:_MOST_IN_ALL_SETS])]))
    found = [
        family("labels", some, mirrored)
        for items in (*axes, *_twins(layout))
        for some in _sets(items)
        for mirrored in (mirrors if len(items[0].places) == 2 else [()])
    ]
    whole = [_Item((v,), 0, flat[None, v.where]) for v in layout.variables if transform_of(v) in _MIRRORED]
    signs = [[axis for axis in those if transform_of(axis.variables[0]) in _MIRRORED] for those in axes]
    # Those of whole variables may be products of those by label.
    found += [family("sign", some) for items in (*signs, whole) for some in _sets(items)]
    return sorted(found, key=lambda family: len(family.where))


def _axes_by_length(layout: Layout) -> tuple[list[list[_Item]], tuple[NDArray[np.intp], ...]]:
    """Return the axes along which entries could be exchanged, by constrained length, and what is summed."""
    axes, sums, n = dict[int, list[_Item]](), [], layout.n_dim
    for variable in layout.variables:
        transform, shape = transform_of(variable), variable.shape
        places = np.arange(variable.where.start, variable.where.stop).reshape(shape)
        if transform == "simplex":
            sums.append(places.reshape(-1, shape[-1]).T)
            implied = np.arange(n, n + sums[-1].shape[1])
            places, n = np.concatenate([places, implied.reshape(*shape[:-1], 1)], axis=-1), n + len(implied)
        for axis, length in enumerate(places.shape):
            if (transform in _ENTRYWISE or transform == "simplex") and length > 1:
                axes.setdefault(length, []).append(_Item((variable,), axis, np.moveaxis(places, axis, 0)))
    return list(axes.values()), tuple(sums)


def _sets[T](items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Return sets of items: all of them at once where they are many, then small ones first."""
    n = len(items)
    if n > _MOST_IN_ALL_SETS:
        yield tuple(items)
    yield from islice(chain.from_iterable(combinations(items, size) for size in range(1, n + 1)), _MOST_SETS)


def _twins(layout: Layout) -> list[list[_Item]]:
    """Return pairs of variables whose names differ in a character or two, as ``mu_a`` and ``mu_b`` do."""
    alike: dict[tuple[str, str], list[_Item]] = {}
    flat = np.arange(layout.n_dim)
    for one, other in combinations(layout.variables[:_MOST_SETS], 2):
        apart = _apart(one.name, other.name)
        if apart and one.shape == other.shape and transform_of(one) == transform_of(other):
            item = _Item((one, other), 0, np.stack([flat[one.where], flat[other.where]]))
            alike.setdefault(apart, []).append(item)
    return list(alike.values())


def _apart(one: str, other: str) -> tuple[str, str] | None:
    """Return in what two names differ, if that is little beside what they share."""
    n = min(len(one), len(other))
    head = next((i for i in range(n) if one[i] != other[i]), n)
    tail = next((i for i in range(n - head) if one[-1 - i] != other[-1 - i]), n - head)
    first, second = one[head : len(one) - tail], other[head : len(other) - tail]
    short = max(len(first), len(second)) <= _MOST_APART and head + tail > 0
    return (first, second) if short else None


# --- modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor ---

#: Draws at which log p is compared, and evaluations of log p at most.
N_COMPARED, MOST_EVALUATIONS = 8, 512
#: Rounding of log p, relative: far above that of sums of a million terms, far below any change that data make.
_ROUNDING = 1e-9


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
    families = families_of(layout) if len(comparison.theta) else []
    # The first and the last of a family stand for all of it.
    ends = [(family, member) for family in families for member in (*family.members[:1], *family.members[1:][-1:])]
    holds = comparison.hold_at_one([member for _, member in ends])
    promising = {id(family) for (family, _), held in zip(ends, holds, strict=True) if held}
    kept: list[tuple[SymmetryFamily, list[_Image]]] = []
    for family in families:
        if id(family) in promising and _is_new(family, kept):
            kept.append((family, [comparison.image(member) for member in family.members]))
    return tuple(_counted(kept, layout.n_dim)), comparison.n_log_p


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
        self.log_q = q.rough_log_density(self.theta)

    def _log_p(self, theta: Array) -> Array:
        self.left -= len(theta)
        self.n_log_p += len(theta)
        return self.density.logp(theta) if len(theta) else np.empty(0)

    def hold_at_one(self, members: list[Symmetry]) -> list[bool]:
        """Tell which candidates leave log p as it is at the first draw; False of those beyond the number."""
        result: list[bool] = []
        affordable, size = members[: self.left], max(1, STREAMED // max(self.theta.shape[1], 1))
        for some in (affordable[i : i + size] for i in range(0, len(affordable), size)):
            logp = self._log_p(np.concatenate([member(self.theta[:1]) for member in some]))
            result += _equal(logp, self.logp[0]).tolist()
        return result + [False] * (len(members) - len(result))

    def image(self, member: Symmetry) -> _Image:
        """Tell where a candidate maps most of q, and whether it is a symmetry if that is elsewhere."""
        theta = member(self.theta)
        with np.errstate(invalid="ignore", over="ignore"):
            outside = ~(self.log_q - self.q.rough_log_density(theta) <= LOG_OUTSIDE)
        if outside.mean() <= MOSTLY:
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
            by_label = family.kind == "sign" and len(family.members) > 1
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
