"""Iterations of `LineSearch` in a loop that JAX compiles, for as long as nothing out of the ordinary happens.

Each is what `LineSearch.step` does by the rules of quadrature that it finds: a step of size 1 or as it was, corrected
by secants near the optimum, shortened where the ELBO would fall. Whatever takes another look ends the span *before* the
iteration in which it comes up, which is then NumPy's: rules for other widths, a precision that is not positive
definite, an ELBO that is not finite, a search in vain.
"""

import functools

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax import lax

from pymc_ngvi.families.matrices.on_jax import Form, Traced
from pymc_ngvi.families.matrices.structure import LOG_2PI
from pymc_ngvi.steps.jitted.pairs import Pairs, trusted
from pymc_ngvi.steps.schedule import linesearch as search
from pymc_ngvi.steps.trials import ROUNDING


class Settings(NamedTuple):
    """What is the same in all iterations of a fit.

    Parameters
    ----------
    form : Form
    exact_metric : bool
    near : float
        Gap in nats, below which steps are learned from.
    solved : float
        Gap, and gain of a step, below which there is nothing left to do.
    least_ratio, flat, longest : float
        As in `linesearch`.
    most_idle : int
    """

    form: Form
    exact_metric: bool
    near: float
    solved: float
    least_ratio: float
    flat: float
    longest: float
    most_idle: int


class Carried(NamedTuple):
    """A state on its way; see `LineSearchState`.

    Parameters
    ----------
    mean, factor, elbo, grad, curvature, gap
        Of q, with whitened moments.
    step_size, next_step_size, pairs, left, gain, idle
        Of the search.
    sites, second : array, shape (n_rows,) or (0,)
        Where they are asked for.
    knows_sites, bent : bool
    gap_before : float
        Of the state before the last iteration.
    n, n_evaluated : int
        Iterations done, and expectations taken.
    over, by_host : bool
        Whether to go on no more, and whether that is because the next iteration is NumPy's.
    history : array, shape (most, 2)
        ELBO and gap after each iteration.
    """

    mean: Traced
    factor: Traced
    elbo: Traced
    grad: Traced
    curvature: Traced
    gap: Traced
    step_size: Traced
    next_step_size: Traced
    pairs: Pairs
    left: Traced
    gain: Traced
    idle: Traced
    sites: Traced
    second: Traced
    knows_sites: Traced
    bent: Traced
    gap_before: Traced
    n: Traced
    n_evaluated: Traced
    over: Traced
    by_host: Traced
    history: Traced


class _Trial(NamedTuple):
    """A state that was tried, and how the search goes."""

    rho: Traced
    mean: Traced
    factor: Traced
    elbo: Traced
    grad: Traced
    hessian: Traced
    second: Traced
    n_tried: Traced
    n_proposed: Traced
    accepted: Traced
    by_host: Traced


def span_of(sums: Callable[..., Any], settings: Settings) -> Any:
    """Return the loop, to be compiled: from arrays of rows, a state, and the most iterations, to where these lead.

    Parameters
    ----------
    sums : callable
        From arrays, mean and factor to expectations.
    settings : Settings
    """

    def span(arrays: Any, start: Carried, most: Traced, stop_bent: Traced) -> Carried:
        step = functools.partial(_iteration, functools.partial(sums, arrays), settings, stop_bent)
        end: Carried = lax.while_loop(lambda c: (c.n < most) & ~c.over, step, start)
        return end

    return jax.jit(span)


def _iteration(sums: Callable[..., Any], s: Settings, stop_bent: Traced, c: Carried) -> Carried:
    """Return the state after one iteration; the same, marked for NumPy, where that has to take it."""
    gradient = _natural_gradient(s.form, c.grad, c.curvature)
    corrected = (c.pairs.n > 0) & (c.gap < s.near)
    direction = lax.cond(corrected, c.pairs.correct, lambda g: g, gradient)
    slope = jnp.where(corrected, direction @ gradient, 2.0 * c.gap)
    trial = _search(sums, s, c, direction, slope)
    gain = trial.elbo - c.elbo
    short = corrected & ~(gain >= s.least_ratio * trial.rho * slope)
    by_host = trial.by_host | ~trial.accepted | short | ~(slope > 0.0)
    new = _moved(s, c, trial, corrected, gradient, direction, slope)
    bent_now = new.bent & ~c.bent & stop_bent
    ends = _is_solved(s, new) | (new.idle >= s.most_idle) | ((new.gap < s.near) & (s.near <= c.gap)) | bent_now
    new = new._replace(over=ends)
    same = c._replace(n_evaluated=c.n_evaluated + trial.n_proposed, over=jnp.array(True), by_host=jnp.array(True))
    taken: Carried = jax.tree.map(lambda a, b: jnp.where(by_host, a, b), same, new)
    return taken


def _natural_gradient(form: Form, grad: Traced, curvature: Traced) -> Traced:
    return jnp.concatenate([grad, form.flat(form.plus_diagonal(curvature, -1.0)) / jnp.sqrt(2.0)])


def _is_solved(s: Settings, c: Carried) -> Traced:
    gap = jnp.where(jnp.isfinite(c.left), jnp.maximum(c.gap, c.left), c.gap)
    return jnp.maximum(gap, c.gain) < s.solved


# --- the search along a direction ---


def _search(sums: Callable[..., Any], s: Settings, c: Carried, direction: Traced, slope: Traced) -> _Trial:
    """Go along a direction as far as the ELBO does not fall; see `search`."""
    least = c.elbo - ROUNDING * (1.0 + jnp.abs(c.elbo))
    none = jnp.array(False)
    start = _Trial(
        c.next_step_size, c.mean, c.factor, c.elbo, c.grad, s.form.zeros(len(c.mean)), c.second, jnp.array(0),
        jnp.array(0), none, none,
    )  # fmt: skip

    def tried(t: _Trial) -> _Trial:
        mean, factor, safe = _proposed(s.form, c, direction, t.rho)
        found = sums(mean, factor)
        entropy = s.form.log_det(factor) + 0.5 * len(mean) * (LOG_2PI + 1.0)
        elbo = found.value + entropy
        finite = jnp.isfinite(elbo) & jnp.isfinite(found.grad).all()
        high = elbo >= least
        by_host = ~safe | ~finite | (high & found.is_stale)
        accepted = high & ~by_host
        gained = elbo - c.elbo
        hopeless = -gained > jnp.maximum(search.HOPELESS, search.TIMES * t.rho * slope)
        n_tried, n_proposed = t.n_tried + (~accepted & ~hopeless), t.n_proposed + 1
        ends = (n_tried >= search.MAX_TRIALS) | (n_proposed >= search.MAX_PROPOSED)
        rho = jnp.where(accepted, t.rho, t.rho * _shorter(t.rho * slope, gained))
        second = jnp.concatenate(found.second) if c.second.size else c.second
        return _Trial(
            rho, mean, factor, elbo, found.grad, found.hessian, second, n_tried, n_proposed, accepted,
            by_host | (ends & ~accepted),
        )  # fmt: skip

    end: _Trial = lax.while_loop(lambda t: ~t.accepted & ~t.by_host, tried, start)
    return end


def _shorter(slope: Traced, gained: Traced) -> Traced:
    """Return the part of a step to try next; see `search`."""
    top = jnp.where(slope > gained, 0.5 * slope / jnp.where(slope > gained, slope - gained, 1.0), 0.5)
    return jnp.clip(top, search.LEAST_PART, 0.5)


def _proposed(form: Form, c: Carried, direction: Traced, rho: Traced) -> tuple[Traced, Traced, Traced]:
    """Return mean and factor after a natural step of a size, and whether the new precision is safely positive."""
    n_dim, part = len(c.mean), jnp.minimum(rho, 1.0)
    along = jnp.maximum(rho, 1.0) * direction
    error = form.unflat(jnp.sqrt(2.0) * along[n_dim:])
    matrix = form.plus_diagonal(part * error, 1.0)  # (1 - part) I + part (I + error)
    factor, step, safe = form.scaled(c.factor, matrix, along[:n_dim])
    return c.mean + part * step, factor, safe & jnp.isfinite(along).all()


# --- after a step ---


def _moved(
    s: Settings, c: Carried, t: _Trial, corrected: Traced, gradient: Traced, direction: Traced, slope: Traced
) -> Carried:
    """Return the state after a step that was accepted; see `LineSearch`."""
    form, rho = s.form, t.rho
    grad, curvature = form.whiten(t.factor, t.grad), form.curvature(t.factor, t.hessian)
    after = _natural_gradient(form, grad, curvature)
    gap = 0.5 * (after @ after)
    gain = t.elbo - c.elbo
    step, change = rho * direction, gradient - after
    known = Pairs(c.pairs.steps, c.pairs.changes, jnp.where(corrected, c.pairs.n, 0))
    learns = trusted(step, change, exact_metric=s.exact_metric)
    learns = learns & (c.gap < s.near) if s.exact_metric else learns
    pairs = lax.cond(learns, lambda p: p.with_one(step, change), lambda p: p, known)
    left = 0.5 * (after @ pairs.correct(after))
    longest = jnp.where((gain > s.flat * rho * slope) & (rho >= 1.0), s.longest, 1.0)
    idle = jnp.where(gain > ROUNDING * (1.0 + jnp.abs(c.elbo)), 0, c.idle + 1)
    fell_short = ~corrected & (rho < jnp.minimum(1.0, c.next_step_size))
    sites, knows_sites = _mixed(c, rho, corrected)
    return Carried(
        t.mean, t.factor, t.elbo, grad, curvature, gap, rho, jnp.minimum(longest, 2.0 * rho), pairs, left, gain, idle,
        sites, t.second, knows_sites, c.bent | fell_short, c.gap, c.n + 1,
        c.n_evaluated + t.n_proposed, c.over, c.by_host,
        c.history.at[c.n].set(jnp.stack([t.elbo, gap_shown(gap, left)])),
    )  # fmt: skip


def gap_shown(gap: Traced, left: Traced) -> Traced:
    """Return the gap that a state tells of."""
    return jnp.where(jnp.isfinite(left), jnp.maximum(gap, left), gap)


def _mixed(c: Carried, rho: Traced, corrected: Traced) -> tuple[Traced, Traced]:
    """Return the sites after a natural step of a size, and whether they are known."""
    curvature = -c.second
    sites = jnp.where(c.knows_sites, c.sites + rho * (curvature - c.sites), curvature)
    return sites, ~corrected & (c.knows_sites | (rho == 1.0))
