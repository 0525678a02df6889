"""Modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor."""

import math

from dataclasses import dataclass
from enum import Enum

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.results.diagnosis.symmetries import Exchange, Flip, SymmetryFamily, families_of
from pymc_ngvi.results.posterior import Distribution

#: Draws at which log p is compared, and evaluations of log p at most.
N_DRAWS, MOST_EVALUATIONS = 8, 512
#: Rounding of log p, relative: far above that of sums of a million terms, far below any change that data make.
_ROUNDING = 1e-9
#: Log of the ratio of densities from which on an image of a draw is outside q, and the part of them that has to be: as
#: for other modes (`elsewhere`).
_LOG_OUTSIDE, _MOSTLY = 3.0, 0.5
#: Numbers in the images that are held at once.
_ELEMENTS = 2**20


@dataclass(frozen=True)
class EqualModes:
    """A symmetry of log p that q does not have.

    Parameters
    ----------
    kind : {"labels", "sign"}
    names : tuple of str
        Variables whose entries are exchanged, or change signs, together.
    number : int
        Of equal modes that it makes.
    by_label : bool
        Whether signs change for each label along an axis on its own.
    covered : {"one", "some", "all"}
        How many of these modes q covers; "some": there may be more of them.
    """

    kind: str
    names: tuple[str, ...]
    number: int
    by_label: bool = False
    covered: str = "one"


def equal_modes(
    density: ModelDensity, q: Distribution, theta: Array, layout: Layout, most: int = MOST_EVALUATIONS
) -> tuple[tuple[EqualModes, ...], int]:
    """Return the symmetries of log p that map q to somewhere else, and how many evaluations of log p that took.

    A symmetry leaves log p as it is at each draw, not only in the mean; a single draw rules out almost all candidates.

    Parameters
    ----------
    density : ModelDensity
    q : Distribution
    theta : ndarray, shape (n_draws, n_dim)
        Draws of q.
    layout : Layout
    most : int
        Evaluations at most.

    Returns
    -------
    modes : tuple of EqualModes
    n_log_p : int
        0 where the density of q is not known: nothing tells then whether q covers an image.
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
        affordable, size = members[: self.left], max(1, _ELEMENTS // max(self.theta.shape[1], 1))
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
