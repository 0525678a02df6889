"""What there is to say of modes beside that of the fit: where they are, and how much of the posterior they have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.draws import draws_of
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import PoolState

#: Draws of each approximation by which masses are compared.
_N_DRAWS = 512
#: Log of the ratio to q from which on a draw is outside of it, and the part of the draws that has to be.
_LOG_OUTSIDE, _MOSTLY = 3.0, 0.5
#: Part of the mass that is expected at a mode, from which on draws have found it, but for two standard errors.
_FOUND = 0.5
#: Draws by which it is seen whether another posterior covers a mode.
N_SEEN = 2_000


@stored("fit.other_mode")
@dataclass(frozen=True)
class OtherMode:
    """A mode of the posterior that a fit is not at."""

    #: An approximation there, on the unconstrained scale.
    q: VariationalState
    #: Of the mass about all modes that were found.
    share: float
    #: Whether log p is as high there, and as wide: an image of the fit under a symmetry, where there is one.
    is_equal: bool = False


@stored("fit.searched")
@dataclass(frozen=True)
class Searched:
    """What came of a search for other modes, as a record has it."""

    #: Why the fit is one from another mode, in a sentence; empty where it is not.
    restarted: str = ""
    #: That are left besides.
    modes: tuple[OtherMode, ...] = ()
    #: Gradients that the search took.
    n_searched: int = 0


def is_outside(density: ModelDensity, q: VariationalState, elbo: float, other: VariationalState, seed: int) -> bool:
    """Tell whether most of another approximation is where q lacks mass."""
    theta = draws_of(other, _N_DRAWS // 8, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        log_p, log_q = density.logp(theta), np.asarray(q.log_density(theta))
        outside = np.isfinite(log_p) & ~(log_q >= log_p - elbo - _LOG_OUTSIDE)
    return bool(outside.mean() >= _MOSTLY)


def shares(density: ModelDensity, states: Sequence[VariationalState], seed: int) -> Array:
    """Return the mass of the posterior at each of some approximations, as parts of that at all of them.

    By importance sampling: draws of their mixture, each counted for the components that it may be of.
    """
    rng = np.random.default_rng(seed)
    theta = np.concatenate([draws_of(state, _N_DRAWS, rng) for state in states])
    with np.errstate(all="ignore"):
        log_p = density.logp(theta)
        parts = np.array([state.log_density(theta) for state in states])
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    log_mixture = logsumexp(parts, axis=0)
    masses = logsumexp(log_p - log_mixture + parts - log_mixture, axis=1)
    return np.exp(masses - logsumexp(masses))


def not_covered(
    modes: Sequence[OtherMode], posterior: PoolState, seed: int, *, equal: bool = False
) -> tuple[OtherMode, ...]:
    """Return the modes that draws of another posterior do not have their share at; images of its own on demand."""
    modes = [mode for mode in modes if equal or not mode.is_equal]
    if not modes:
        return ()
    draw = posterior.draw(N_SEEN, np.random.default_rng(seed))
    parts = np.array([posterior.gaussian.log_density(draw), *(mode.q.log_density(draw) for mode in modes)])
    found = np.bincount(parts.argmax(axis=0), minlength=len(parts))[1:]
    expected = len(draw) * np.array([mode.share for mode in modes])
    missed = found < _FOUND * expected - 2.0 * np.sqrt(expected)
    return tuple(mode for mode, is_missed in zip(modes, missed, strict=True) if is_missed)


def left_out(modes: Sequence[OtherMode]) -> str:
    """Say, without a subject, what a posterior leaves out."""
    what = "a mode" if len(modes) == 1 else f"{len(modes)} modes"
    return f"leaves out {what} with {100.0 * sum(mode.share for mode in modes):.2g} % of the mass"
