"""The family for a model, where the user names none: by what a step would cost, and whether it fits in memory."""

from typing import NamedTuple

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import fits_in_memory
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, STRUCTURED, FullState, SparseFamily
from pymc_ngvi.families.dissection import cheapest_with_fill, find_structure, step_seconds
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure, SummedStructure

#: Dimensions below which a dense covariance costs nothing worth saving, and below which it costs less in any case.
_SMALL, _LESS = 40, 48


class FamilyChoice(NamedTuple):
    """A family and why it was taken."""

    #: Of a registered family.
    name: str
    #: For the closing line of the fit; empty where there was nothing to choose.
    reason: str = ""
    #: Taken because nothing better fits in memory.
    is_makeshift: bool = False


def choose_family(density: ModelDensity, *, may_fill: bool = False, may_sum: bool = False) -> FamilyChoice:
    """Return the family that suits a model."""
    n_dim = density.n_dim
    if n_dim < _SMALL:
        return FamilyChoice(DENSE)
    dense_fits = fits_in_memory(FullState.memory_bytes(n_dim))
    filled = cheapest_filled(density, sums=may_sum) if may_fill else None
    if filled is None and density.pattern is None:
        if dense_fits:
            return FamilyChoice(DENSE, "the Hessian is dense")
        return FamilyChoice(INDEPENDENT, "the Hessian is dense, and a dense covariance does not fit in memory", True)
    structure = filled or find_structure(density.pattern)
    sparse_fits = fits_in_memory(SparseFamily(structure).memory_bytes(n_dim))
    of_dense = prices.of_dense(n_dim) + prices.PER_COLUMN * n_dim if n_dim >= _LESS else 0.0
    if sparse_fits and (step_seconds(structure) + prices.PER_COLUMN * _columns(structure) < of_dense or not dense_fits):
        return FamilyChoice(STRUCTURED, in_short(structure))
    if dense_fits:
        return FamilyChoice(DENSE, "a sparse precision would take longer")
    return FamilyChoice(INDEPENDENT, "neither a dense covariance nor a sparse precision fits in memory", True)


def _columns(structure: ArrowStructure | FilledStructure) -> int:
    """Return the columns of a Hessian that are computed one by one, where blocks share theirs; with fill-in, few."""
    if isinstance(structure, FilledStructure):
        return 0
    return structure.n_border + int(max(structure.sizes, default=0))


def cheapest_filled(density: ModelDensity, *, sums: bool) -> FilledStructure | None:
    """Return the structure of a factor with fill-in that costs least; None where another form costs less."""
    return cheapest_with_fill(density.summed if sums else None, lambda: density.pattern)


def in_short(structure: ArrowStructure | FilledStructure) -> str:
    """Return how many coordinates are global and how many blocks there are, or how large a factor with fill-in is."""
    if isinstance(structure, FilledStructure):
        n, rows = structure.fronts.n_entries, structure.n_dim
        words = f"a precision whose Cholesky factor has {n:,} entries, {n / rows:,.0f} in a row"
        n_sums = structure.n_sums if isinstance(structure, SummedStructure) else 0
        return words + (f", beside {n_sums} sum{'s'[: n_sums != 1]} over many coordinates" if n_sums else "")
    n, sizes = structure.n_border, structure.sizes
    if not len(sizes):
        return f"all {n:,} coordinates are global"
    least, most = int(sizes[0]), int(sizes[-1])
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    blocks = f"{len(sizes):,} independent block{'s'[: len(sizes) != 1]} of size {size}"
    return f"{n:,} global coordinate{'s'[: n != 1]}, {blocks}"
