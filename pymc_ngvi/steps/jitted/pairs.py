"""Secant pairs as arrays of fixed size, and what they correct; see `secant`."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax import lax

from pymc_ngvi.families.matrices.on_jax import Traced
from pymc_ngvi.steps.adaptive import secant


class Pairs(NamedTuple):
    """The last steps, and the falls of the natural gradient over them; the latest is last.

    Parameters
    ----------
    steps, changes : array, shape (most, n_params)
    n : int
        How many there are, at the end.
    """

    steps: Traced
    changes: Traced
    n: Traced

    def without_any(self) -> "Pairs":
        """Return none."""
        return self._replace(n=jnp.zeros_like(self.n))

    def with_one(self, step: Traced, change: Traced) -> "Pairs":
        """Return them with one more, the oldest dropped where there are too many."""
        most = len(self.steps)
        steps, changes = (
            jnp.concatenate([old[1:], new[None]]) for old, new in ((self.steps, step), (self.changes, change))
        )
        return Pairs(steps, changes, jnp.minimum(self.n + 1, most))

    def correct(self, gradient: Traced) -> Traced:
        """Multiply a natural gradient by the inverse-BFGS matrix."""
        most = len(self.steps)
        first = most - self.n

        def back(i: Traced, carry: Any) -> Any:
            direction, coefficients = carry
            j = most - 1 - i
            step, change = self.steps[j], self.changes[j]
            coefficient = (step @ direction) / (step @ change)
            return direction - coefficient * change, coefficients.at[j].set(coefficient)

        def forth(j: Traced, direction: Traced) -> Traced:
            step, change = self.steps[j], self.changes[j]
            return direction + (coefficients[j] - (change @ direction) / (step @ change)) * step

        direction, coefficients = lax.fori_loop(0, self.n, back, (gradient, jnp.zeros(most)))
        return lax.fori_loop(first, most, forth, direction)


def trusted(step: Traced, change: Traced, *, exact_metric: bool) -> Traced:
    """Tell whether a pair measures a curvature that can be used; see `secant.trusted`."""
    product, step_square, change_square = step @ change, step @ step, change @ change
    long_enough = step_square >= secant.LEAST_STEP**2
    if not exact_metric:
        size = jnp.sqrt(step_square * change_square)
        cosine = jnp.where(change_square > 0.0, product / jnp.where(size > 0.0, size, 1.0), 0.0)
        close = (cosine > secant.MIN_COSINE) & (product * secant.MAX_STRETCH_INEXACT > step_square)
        return long_enough & close
    return (
        long_enough & (product * secant.MAX_STRETCH > step_square) & (change_square <= secant.MAX_STIFFNESS * product)
    )
