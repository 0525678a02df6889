"""The line search of exact expectations on JAX, with NumPy for what is out of the ordinary."""

import functools

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pymc_ngvi.core.target import RowRules, RowsOnDevice
from pymc_ngvi.core.types import GaussianState, Moments
from pymc_ngvi.density.jitted.sums import sums
from pymc_ngvi.families.matrices.on_jax import factor_of, form_of
from pymc_ngvi.graphs.jaxed import in_float64
from pymc_ngvi.steps import linesearch
from pymc_ngvi.steps.adaptive.growth import SPAN
from pymc_ngvi.steps.adaptive.secant import Pair
from pymc_ngvi.steps.jitted.pairs import Pairs
from pymc_ngvi.steps.jitted.span import Carried, Settings, span_of
from pymc_ngvi.steps.linesearch import LineSearch, LineSearchState
from pymc_ngvi.steps.newton import may_serve


class JittedLineSearch(LineSearch):
    """`LineSearch`, several iterations in one call: the same states, but for rounding.

    Parameters
    ----------
    *args, **kwargs
        Those of `LineSearch`.
    rows : callable
        Returns the rows of the target, which are others for other data; None where there are none any more.
    """

    def __init__(self, *args: Any, rows: Callable[[], RowsOnDevice | None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._find, self._rows, self._by_host = rows, rows(), False
        self._rules: RowRules | None = None
        self._arrays: Any = None

    def leap(self, state: LineSearchState, most: int) -> tuple[LineSearchState, list[tuple[float, float]]]:
        """Return the state after some iterations, and ELBO and gap after each.

        Parameters
        ----------
        state : LineSearchState
        most : int
            Iterations, at most.
        """
        by_host, self._by_host = self._by_host, False
        is_first = not state.growth.n  # widths will be others
        if not (by_host or is_first or state.rules is None or self._by_newton_next(state)) and (rows := self._now()):
            after, history = self._spanned(rows, state, min(most, SPAN - state.growth.n % SPAN))
            if history:
                return after, history
        new = self.step(state)
        return new, [(new.elbo, new.gap)]

    def _by_newton_next(self, state: LineSearchState) -> bool:
        """Tell whether a step of Newton may be the next."""
        return bool(state.bent and state.n_newton) and may_serve(state.q, state.bends)

    def _now(self) -> RowsOnDevice | None:
        """Return the rows with the data as they are."""
        rows = self._find()
        if rows is not self._rows:
            self._rows, self._rules = rows, None
        return rows

    def _spanned(
        self, rows: RowsOnDevice, state: LineSearchState, most: int
    ) -> tuple[LineSearchState, list[tuple[float, float]]]:
        """Go on by JAX for as long as that serves."""
        assert state.rules is not None
        newton = may_serve(state.q, state.bends)
        with in_float64():
            if self._rules is not state.rules:
                self._rules, self._arrays = state.rules, rows.arrays(state.rules)
            start = _carried(state, with_sites=newton)
            given = self._arrays, start, jnp.asarray(most), jnp.asarray(newton)
            end = Carried(*self._span(rows, state.q, given)(*given))
            n = int(end.n)
            self._target.n_gradients += int(end.n_evaluated)
            self._target.n_hessians += int(end.n_evaluated)
            self._by_host = bool(end.by_host)
            if not n:
                return state, []
            history = [(float(elbo), float(gap)) for elbo, gap in np.asarray(end.history)[:n]]
            new = self._state_of(state, end, n, with_sites=newton)
        last = self._looked_at(new, float(end.gap_before))
        return last, [*history[:-1], (last.elbo, last.gap)]

    def _span(self, rows: RowsOnDevice, q: GaussianState, given: Any) -> Any:
        """Return the loop, compiled once for the same rows and arrays of the same shapes."""
        form = form_of(q)
        assert form is not None
        settings = Settings(
            form=form,
            exact_metric=q.exact_metric,
            near=linesearch.near(q),
            solved=linesearch.PART * self._tolerance.least(q),
            least_ratio=linesearch.LEAST_RATIO,
            flat=linesearch.FLAT,
            longest=linesearch.LONGEST,
            most_idle=linesearch.MOST_IDLE,
        )
        key = settings, str(jax.tree.map(jnp.shape, given))
        if key not in rows.compiled:
            with rows.timed():
                of_rows = functools.partial(sums, rows.kinds, settings.form)
                rows.compiled[key] = span_of(of_rows, settings).lower(*given).compile()
        return rows.compiled[key]

    def _state_of(self, before: LineSearchState, end: Carried, n: int, *, with_sites: bool) -> LineSearchState:
        """Return the state that JAX has led to."""
        q = replace(before.q, location=np.array(end.mean), factor=np.array(end.factor))
        none = np.zeros(q.n_dim)
        moments = Moments(
            np.array(end.grad), np.array(end.curvature), none, none, float(end.gap), floor=0.0, floor_sd=0.0
        )
        kept = range(len(end.pairs.steps) - int(end.pairs.n), len(end.pairs.steps))
        new = replace(
            before,
            q=q, elbo=float(end.elbo), moments=moments, error=np.nan, step_size=float(end.step_size),
            next_step_size=float(end.next_step_size),
            pairs=tuple(Pair(np.array(end.pairs.steps[i]), np.array(end.pairs.changes[i])) for i in kept),
            left=float(end.left), gain=float(end.gain), idle=int(end.idle), stalled=False,
            growth=functools.reduce(lambda growth, _: growth.after(q), range(n), before.growth),
            bends=None, sites=np.array(end.sites) if with_sites and bool(end.knows_sites) else None,
            bent=bool(end.bent),
        )  # fmt: skip
        if with_sites:  # what NumPy's next iteration may take
            new = replace(new, bends=self._estimator.by_rules(self._target, q, before.rules).expectation.bends)
        return new


def _carried(state: LineSearchState, *, with_sites: bool) -> Carried:
    """Return a state as JAX takes it."""
    q, most = state.q, linesearch.N_PAIRS if state.q.exact_metric else linesearch.N_PAIRS_INEXACT
    curvature = state.moments.curvature
    n_params, n = q.n_dim + curvature.size, len(state.pairs)
    steps, changes = np.zeros((most, n_params)), np.zeros((most, n_params))
    for i, pair in enumerate(state.pairs):
        steps[most - n + i], changes[most - n + i] = pair.step, pair.change
    second = state.bends.second if with_sites and state.bends is not None else np.zeros(0)
    sites = -second if state.sites is None or not with_sites else state.sites
    number, flag = _number, jnp.asarray
    return Carried(
        jnp.asarray(q.location), jnp.asarray(factor_of(q)), number(state.elbo),
        jnp.asarray(state.moments.grad), jnp.asarray(curvature), number(state.moments.gap), number(state.step_size),
        number(state.next_step_size), Pairs(jnp.asarray(steps), jnp.asarray(changes), jnp.asarray(n)),
        number(state.left), number(state.gain), jnp.asarray(state.idle), jnp.asarray(sites), jnp.asarray(second),
        flag(with_sites and state.sites is not None), flag(state.bent), number(state.moments.gap), jnp.asarray(0),
        jnp.asarray(0), flag(False), flag(False), jnp.zeros((SPAN, 2)),
    )  # fmt: skip


def _number(value: float) -> Any:
    return jnp.asarray(value, dtype=jnp.float64)
