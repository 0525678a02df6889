"""Numbers that hang on something as fixed linear combinations of few of them do.

Design weights of effects that are not centred are known numbers times a scale, those of correlated ones combinations
of a row of a Cholesky factor: whatever the hyperparameters, all of them follow from those of a few rows. Which these
are is found from samples, as in adaptive cross approximation [1]_.

References
----------
.. [1] M. Bebendorf (2000). Approximation of boundary element matrices. Numerische Mathematik 86(4).
   https://doi.org/10.1007/PL00005410
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array

#: Weights of one of the members that are rounding.
_ROUNDING = 1e-11


@dataclass(frozen=True, eq=False)
class Separable:
    """Numbers as combinations of some of them."""

    #: Which of the numbers; shape (n_members,).
    members: NDArray[np.intp]
    #: shape (n, n_members).
    weights: Array

    @classmethod
    def of(cls, samples: Array, scale: Array, tolerance: float) -> "Separable | None":
        """Find which numbers all follow from; None where they are as many as there are samples, nearly."""
        n_samples, n = samples.shape
        whole = samples * np.divide(1.0, scale, out=np.zeros(n), where=scale > 0.0)
        left, members = whole.copy(), list[int]()
        while len(members) < n_samples - 2:
            size = np.einsum("sn,sn->n", left, left)
            best = int(np.argmax(size))
            if not size[best] > tolerance**2 * n_samples:
                break
            members.append(best)
            direction = left[:, best] / np.sqrt(size[best])
            for _ in range(2):  # once more, for what rounding has left
                left -= direction[:, None] * (direction @ left)
        else:
            return None
        if not members:
            return cls(np.empty(0, dtype=np.intp), np.zeros((n, 0)))
        weights = np.linalg.lstsq(whole[:, members], whole, rcond=None)[0].T
        weights[np.abs(weights) < _ROUNDING] = 0.0
        return cls(np.array(members, dtype=np.intp), weights * scale[:, None] / scale[members])

    def agrees(self, samples: Array, scale: Array, tolerance: float) -> bool:
        """Tell whether other samples, (n_samples, n), are such combinations."""
        apart = np.abs(samples[:, self.members] @ self.weights.T - samples)
        size = np.maximum(scale, np.abs(samples))
        return bool((apart <= tolerance * size).all())
