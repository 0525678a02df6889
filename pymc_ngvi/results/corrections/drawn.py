"""Draws on their way to the user."""

from typing import Any, NamedTuple

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array


class Drawn(NamedTuple):
    """Draws, and what is known of them.

    Parameters
    ----------
    theta : ndarray, shape (n_draws, n_dim)
        Unconstrained.
    log_p : ndarray, shape (n_draws,), or None
        Where it was evaluated.
    stats : dict
        More for ``sample_stats``, (n_draws,) each.
    attrs : dict
        For the groups ``posterior`` and ``sample_stats``.
    """

    theta: Array
    log_p: Array | None
    stats: dict[str, NDArray[Any]]
    attrs: dict[str, Any]
