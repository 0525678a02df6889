"""Which coordinates of a model to give, so that what is left is a latent Gaussian model: its hyperparameters."""

import math

from collections.abc import Iterator

import numpy as np

from numpy.typing import NDArray
from pymc.distributions.transforms import CholeskyCovPacked

from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.rows_given import NotRows, RowsGiven
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.rows.quadratic import is_quadratic

#: Elements of a variable that may be given, and of all of them, at most: at first; where that leads nowhere.
_FEW, _MANY = (6, 10), (40, 48)


def latent_rows(density: LogDensity) -> RowsGiven:
    """Return log p as rows, its hyperparameters being given.

    These are the few parameters with a transform (scales, correlations, shapes), and others that enter rows beside a
    predictor: what is left is Gaussian but for functions of one predictor each, or nearly so.
    """
    found: RowsGiven | NotRows = density.functions.made.latent_rows.of(lambda: _found_or_not(density))
    if isinstance(found, NotRows):
        raise found
    found.bind()
    return found


def ratios(density: LogDensity, outside: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Return which hyperparameters have the exponential of another one as their scale, and these others.

    So have the entries of a Cholesky factor beside the diagonal of their row, whose logarithms are coordinates.
    """
    found, model = [], density.model
    place = {coordinate: number for number, coordinate in enumerate(outside.tolist())}
    for variable in density.layout.variables:
        transform = model.rvs_to_transforms[model[variable.name]]
        if not isinstance(transform, CholeskyCovPacked):
            continue
        rows, cols = np.tril_indices(math.isqrt(2 * variable.shape[-1]))  # as packed factors have them
        diagonal = np.flatnonzero(rows == cols)[rows]
        for start in range(variable.where.start, variable.where.stop, len(rows)):
            for at, by in start + np.column_stack([np.arange(len(rows)), diagonal])[rows != cols]:
                if at in place and by in place:
                    found.append((place[at], place[by]))
    return found


def _found_or_not(density: LogDensity) -> RowsGiven | NotRows:
    """Return what few hyperparameters give, or many, where with few there are no rows, or none that are concave."""
    few = _found(density, *_FEW)
    if not isinstance(few, NotRows) and (few.is_concave or not _of_size(density, _FEW[0] + 1, _MANY[0])):
        return few
    many = _found(density, *_MANY)
    return few if isinstance(many, NotRows) and not isinstance(few, NotRows) else many


def _of_size(density: LogDensity, least: int, most: int) -> list[Variable]:
    """Return the variables with a transform of such sizes."""
    return [v for v in density.layout.variables if v.value_name != v.name and least <= v.size <= most]


def _found(density: LogDensity, most_of_one: int, most: int) -> RowsGiven | NotRows:
    try:
        return _given(density, most_of_one, most)
    except NotRows as reason:
        return reason


def _given(density: LogDensity, most_of_one: int, most: int) -> RowsGiven:
    if density.has_minibatch:
        raise NotRows(Reason.IN_PART, "the model reads pm.Minibatch data")
    outside = _of_size(density, 0, most_of_one)
    while True:
        index = _index(outside)
        if not len(index):
            raise NotRows(Reason.NOT_LATENT, "it has no scale, correlation or other transformed parameter")
        if len(index) > most:
            raise NotRows(Reason.NOT_LATENT, f"{len(index)} hyperparameters are more than {most}")
        if len(index) == density.n_dim:
            raise NotRows(Reason.NOT_LATENT, "all of its parameters are hyperparameters")
        given = RowsGiven(density, index)
        others = [v for v in density.layout.variables if v not in outside]
        more = next(_beside(given, others), None)
        if more is None:
            given.integrate_own()
            return given
        outside.append(more)


def _index(variables: list[Variable]) -> NDArray[np.intp]:
    parts = [np.arange(v.where.start, v.where.stop) for v in variables]
    return np.sort(np.concatenate([*parts, np.empty(0)])).astype(np.intp)


def _beside(given: RowsGiven, variables: list[Variable]) -> Iterator[Variable]:
    """Yield small variables that rows read by themselves, beside another predictor, and not as a product with it."""
    dependence = given.reading.predictors.dependence
    sets, index = dependence.sets.tocsr(), dependence.index.ravel()
    few = [v for v in variables if v.size <= _FEW[0]]
    for rows in given.functions:
        if rows.n_directions < 2 or is_quadratic(rows):
            continue
        for column in rows.index.T:
            read = sets[np.unique(index[column])]
            alone = given.inside[np.unique(read.indices)] if (np.diff(read.indptr) == 1).all() else []
            for variable in few:
                if len(alone) and ((alone >= variable.where.start) & (alone < variable.where.stop)).all():
                    yield variable
