"""What Gaussians with a packed factor share: independent blocks, whether or not beside a border."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pymc_ngvi.core.linalg import all_finite, keeps_its_sign
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.lower import LOG_2PI


@dataclass(frozen=True)
class PackedState(Gaussian):
    """A mean and a packed lower-triangular factor; a curvature is a symmetric matrix of the same structure, packed.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        Lower triangular, with a positive diagonal, packed as ``structure`` says.
    structure : BlockStructure or ArrowStructure
    """

    factor: Array
    structure: Any

    factor_sign: ClassVar[int]

    @property
    def factor_values(self) -> Array:
        """The packed factor, (n_entries,)."""
        return self.factor

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return self.factor_sign * self._log_det() + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        result: Array = curvature[self.structure.diagonal]
        return result

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        result = curvature.copy()
        result[self.structure.diagonal] += value
        return result

    def scaled_columns(self, scale: Array) -> Array:
        """Return the factor with each column multiplied."""
        result: Array = self.factor * scale[self.structure.columns]
        return result

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and factor; None where a diagonal entry of it would not stay positive (if signed: not 0)."""
        location, factor = self.location + location_step, self.factor + factor_step
        diagonal = self.structure.diagonal
        valid = keeps_its_sign(self.factor[diagonal], factor_step[diagonal], signed=signed)
        valid = valid and all_finite(location, factor)
        return replace(self, location=location, factor=factor) if valid else None

    def unsigned(self) -> Self:
        """Return the same Gaussian with a factor of positive diagonal."""
        diagonal = self.factor[self.structure.diagonal]
        return self if (diagonal > 0.0).all() else replace(self, factor=self.scaled_columns(np.sign(diagonal)))

    def _log_det(self) -> float:
        """Return the log determinant of the factor."""
        return float(np.sum(np.log(np.abs(self.factor[self.structure.diagonal]))))


def memory_bytes(n_entries: int, n_dim: int) -> int:
    """Return the memory that a fit takes beyond the model's own, at its peak: about 56 packed factors."""
    return 8 * (56 * n_entries + 64 * n_dim)
