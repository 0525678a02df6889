"""From covariances within blocks and with the border to the Gaussian that has them, and an arrow matrix as precision.

An arrow matrix, blocks dense and border last, leaves out no entry that its factor would fill in, so the Gaussian of
given covariances in its entries, of largest entropy, has a closed form [1]_: that of the border, and the regressions of
each block on it.

References
----------
.. [1] S. L. Lauritzen (1996). Graphical Models. Oxford University Press, section 5.3.
"""

import numpy as np

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array
from pymc_ngvi.families import arrow, stacks
from pymc_ngvi.families.arrow import ArrowStructure, Parts


def border_roots(structure: ArrowStructure, factor: Parts) -> tuple[Array, Array]:
    """Return R_G and, by rows, R_i for which R_G R_G^T is the covariance of the border, R_i R_G^T that with a block.

    Parameters
    ----------
    structure : ArrowStructure
    factor : Parts
        T, lower triangular, for the precision T T^T.
    """
    corner = arrow.solve_corner(factor.corner, np.eye(structure.n_border), transpose=True)
    return corner, -arrow.rows_of(structure, "transposed solve", factor.blocks, factor.border @ corner)


def covariance_parts(structure: ArrowStructure, factor: Parts) -> Parts:
    """Return the entries of (T T^T)^-1 in the structure, for a lower-triangular T."""
    corner, beside = border_roots(structure, factor)
    blocks = []
    for t, r in zip(factor.blocks, structure.stacked(beside), strict=True):
        root = stacks.solve_lower(t, np.broadcast_to(np.eye(t.shape[1]), t.shape))
        blocks.append(stacks.transposed(root) @ root + r @ stacks.transposed(r))
    return Parts(blocks, beside @ corner.T, corner @ corner.T)


def factor_of_covariance(structure: ArrowStructure, covariance: Parts) -> Parts | None:
    """Return the lower-triangular T with these entries of (T T^T)^-1; None where they are no covariances."""
    upper = linalg.reverse_cholesky(covariance.corner) if structure.n_border else covariance.corner
    if upper is None:
        return None
    # The border's own precision is U^-T U^-1; the roots of what it explains are cov U^-T.
    corner = linalg.solve_upper(upper, np.eye(structure.n_border)).T if structure.n_border else upper
    explained = covariance.border @ corner
    blocks, unlike = [], structure.stacked(explained)
    for cov, r in zip(covariance.blocks, unlike, strict=True):
        of_rest = stacks.reverse_cholesky(cov - r @ stacks.transposed(r), stacks.diagonal(cov))
        if of_rest is None:
            return None
        inverse = stacks.solve_upper(of_rest, np.broadcast_to(np.eye(cov.shape[1]), cov.shape))
        blocks.append(np.tril(stacks.transposed(inverse)))
    # T T_G^T of block and border: minus the block's precision given the border, times the regression on it.
    border = -arrow.rows_of(structure, "transposed times", blocks, explained @ corner.T)
    return Parts(blocks, border, np.tril(corner))
