"""Updates: parametrisation and step map. One file and one row each."""

from pymc_ngvi.core.types import Direction, Update
from pymc_ngvi.updates.cholesky import cholesky, natural_direction
from pymc_ngvi.updates.cholesky_precision import cholesky_precision
from pymc_ngvi.updates.euclidean import euclidean, euclidean_direction
from pymc_ngvi.updates.natural import natural
from pymc_ngvi.updates.natural_pd import natural_pd
from pymc_ngvi.updates.sqrt import sqrt

UPDATES: dict[str, Update] = {
    "natural": natural,
    "natural_pd": natural_pd,
    "cholesky": cholesky,
    "cholesky_precision": cholesky_precision,
    "sqrt": sqrt,
    "euclidean": euclidean,
}

#: Of the updates that move mean and factor in a straight line: the line's direction.
DIRECTIONS: dict[str, Direction] = {
    "cholesky": natural_direction,
    "cholesky_precision": natural_direction,
    "euclidean": euclidean_direction,
}

__all__ = [
    "DIRECTIONS",
    "UPDATES",
    "cholesky",
    "cholesky_precision",
    "euclidean",
    "natural",
    "natural_pd",
    "sqrt",
]
