"""What counts as an observation in the data of an observed variable."""

from typing import Any

from pymc.variational.minibatch_rv import MinibatchRandomVariable

#: Operations with an observation for each entry of an axis: time series, areas, a grid.
_SERIES = {
    "AutoRegressiveRV", "RandomWalkRV", "GARCH11RV", "EulerMaruyamaRV", "CARRV", "ICARRV", "KroneckerNormalRV",
}  # fmt: skip
#: Operations of which a single vector or matrix is one observation.
_ONE = {"MultinomialRV", "DirichletMultinomialRV", "DirichletRV", "WishartRV"}


def n_axes(rv: Any, n_dim: int) -> int:
    """Return how many of the first axes of the data of a variable count its observations.

    Each row of multivariate data is one observation. The elements of a time series are one each, and so are those of a
    single vector, such as the values of a Gaussian process; a single vector of counts or proportions is one
    observation.
    """
    if rv.owner is not None and isinstance(rv.owner.op, MinibatchRandomVariable):
        rv = rv.owner.inputs[0]
    op = None if rv.owner is None else rv.owner.op
    support = getattr(op, "ndim_supp", 0)
    name = type(op).__name__
    each = name in _SERIES or (n_dim == support and name not in _ONE)
    return n_dim - support + (each and support > 0)


def whole_shape(rv: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of axes in the whole data, of a variable that reads a part of it: those of ``total_size``."""
    if rv.owner is None or not isinstance(rv.owner.op, MinibatchRandomVariable):
        return shape
    sizes = [getattr(size, "data", None) for size in rv.owner.inputs[1:]]
    return tuple(n if size is None else int(size) for size, n in zip(sizes, shape, strict=False))
