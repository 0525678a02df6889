"""Which fits JAX takes whole steps of."""

from pymc_ngvi.core.target import RowsOnDevice
from pymc_ngvi.core.types import Target
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import DENSE, INDEPENDENT
from pymc_ngvi.fitting.options import FitOptions


def why_not_jitted(options: FitOptions) -> str:
    """Return why steps are not jitted whole, in a clause; empty where they are."""
    choice = options.choice
    if choice.family not in (DENSE, INDEPENDENT):
        return f"they go with family='full' or 'diagonal', and this is family={choice.family!r}"
    if choice.estimator != "quadrature":
        return f"they take estimator='quadrature', and this is estimator={choice.estimator!r}"
    if options.reparam is not None:
        return f"they don't go with reparam={options.reparam!r}"
    return ""


def rows_on_jax(target: Target, options: FitOptions) -> RowsOnDevice | None:
    """Return the rows of a target as JAX takes them; None where steps are NumPy's."""
    if not isinstance(target, LogDensity) or target.is_streamed or target.is_sharded or why_not_jitted(options):
        return None
    return target.by_rows.on_jax
