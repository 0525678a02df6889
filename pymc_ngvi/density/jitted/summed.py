"""Rows that depend on several predictors through their sum, traced by JAX; see `SummedRowFunction`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax import lax

from pymc_ngvi.density.jitted.sums import KindOnJax, Roots, reciprocal
from pymc_ngvi.families.matrices.on_jax import Traced


@dataclass(frozen=True, eq=False)
class SummedKindOnJax(KindOnJax):
    """Rows that depend on their last predictors through a sum alone.

    Parameters
    ----------
    n_summed : int
    path : callable
        From the others, u, and the data to the sum where all that it is a sum of is 0, and its slopes in these.
    beside : tuple of int
        Which of u ``function`` takes, before the sum and the data.
    """

    n_summed: int
    path: Callable[..., Traced]
    beside: tuple[int, ...]

    def moments(self, rules: Any, at: Traced, mean: list[Traced], root: Roots, data: list[Traced]) -> Traced:
        """Return E[f], E[f z] and E[f (z z^T - I)], (n_moments, n_rows), of rows that have the same rule."""
        m, size = self.k - self.n_summed, mean[-1].size

        def node(j: Traced, acc: Traced) -> Traced:
            z, weights = rules["nodes"][at, j], rules["weights"][at, :, j]
            points = [mean[a] + sum(root[a, b] * z[b] for b in range(min(a + 1, m))) for a in range(self.k)]
            middle, step = self._along(points, root, data)
            sd = jnp.sqrt(sum(s * s for s in step))
            direction = [s * reciprocal(sd) for s in step]
            found = self._of_sum(rules, at, [points[a][None] for a in self.beside], middle, sd, data)
            return acc + _joined(m, weights, found, direction)

        return lax.fori_loop(0, rules["n_nodes"][at], node, jnp.zeros((self.n_moments, size)))

    def _along(self, points: list[Traced], root: Roots, data: list[Traced]) -> tuple[Traced, list[Traced]]:
        """Return the mean of the sum, and how each direction of what it is a sum of moves it, given u."""
        m, n = self.k - self.n_summed, self.n_summed
        start, *slopes = (
            jnp.broadcast_to(part, (1, points[-1].size))[0] for part in self.path(*[p[None] for p in points[:m]], *data)
        )
        middle = start + sum(slope * point for slope, point in zip(slopes, points[m:], strict=True))
        return middle, [sum(slopes[b] * root[m + b, m + a] for b in range(a, n)) for a in range(n)]

    def _of_sum(
        self, rules: Any, at: Traced, beside: list[Traced], middle: Traced, sd: Traced, data: list[Traced]
    ) -> Traced:
        """Return expectations, times 1, zeta and zeta^2 - 1, given u, (3, n_rows)."""

        def node(i: Traced, acc: Traced) -> Traced:
            total = (middle + rules["along"][at, i] * sd)[None]
            [values] = self.function(*beside, total, *data)
            return acc + rules["weights_along"][at, :, i][:, None] * jnp.broadcast_to(values, total.shape)

        return lax.fori_loop(0, rules["n_along"][at], node, jnp.zeros((3, len(middle))))


def _joined(m: int, weights: Traced, of_sum: Traced, direction: list[Traced]) -> Traced:
    """Return what one node of the others adds to the expectations in all directions."""
    value, slope, bend = of_sum
    first, others, pairs = weights[0], weights[1 : 1 + m, None], weights[1 + m :, None]
    result = [first * value[None], others * value, *[first * (slope * d)[None] for d in direction], pairs * value]
    for a, d in enumerate(direction):
        result += [others * (slope * d), *[first * (bend * d * direction[b])[None] for b in range(a + 1)]]
    return jnp.concatenate(result)
