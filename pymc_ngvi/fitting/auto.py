"""The family for a model, where the user names none: by what a step would cost, and whether it fits in memory."""

from typing import NamedTuple

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import fits_in_memory
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, STRUCTURED, FullState
from pymc_ngvi.families.dissection import cheapest_form, find_blocks, step_seconds, structure_of
from pymc_ngvi.families.matrices.partition import Partition
from pymc_ngvi.families.matrices.sparse.structure import SparseStructure, SummedStructure

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
    form = form_of(density, fill=may_fill, sums=may_sum)
    if form is None:
        if dense_fits:
            return FamilyChoice(DENSE, "the Hessian is dense")
        return FamilyChoice(INDEPENDENT, "the Hessian is dense, and a dense covariance does not fit in memory", True)
    of_dense = prices.of_dense(n_dim) + prices.PER_COLUMN * n_dim if n_dim >= _LESS else 0.0
    costs_less = step_seconds(form) + prices.PER_COLUMN * _columns(form) < of_dense or not dense_fits
    if costs_less and fits_in_memory(structure_of(form).memory_bytes(n_dim)):
        return FamilyChoice(STRUCTURED, in_short(form))
    if dense_fits:
        return FamilyChoice(DENSE, "a sparse precision would take longer")
    return FamilyChoice(INDEPENDENT, "neither a dense covariance nor a sparse precision fits in memory", True)


def _columns(structure: Partition | SparseStructure) -> int:
    """Return the columns of a Hessian that are computed one by one, where blocks share theirs; with fill-in, few."""
    if isinstance(structure, SparseStructure):
        return 0
    return structure.n_border + int(max(structure.sizes, default=0))


def form_of(density: ModelDensity, *, fill: bool, sums: bool) -> Partition | SparseStructure | None:
    """Return the form of a sparse precision that costs least; None where the Hessian is dense."""
    if fill:
        return cheapest_form(density.summed if sums else None, lambda: density.pattern)
    return None if density.pattern is None else find_blocks(density.pattern)


def in_short(structure: Partition | SparseStructure) -> str:
    """Return how many coordinates are global and how many blocks there are, or how large a factor with fill-in is."""
    if isinstance(structure, SparseStructure):
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
