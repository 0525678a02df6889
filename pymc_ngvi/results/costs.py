"""What single evaluations cost, estimated from the graph, the sizes of the data and the dimension: no clock."""

from dataclasses import dataclass

from pymc_ngvi.core.prices import hessian_in_gradients
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.record import FitRecord

#: log p alone, as a part of a gradient.
_LOG_P = 0.75
#: Seconds that a draw and its log density take for each coordinate and each parameter of q.
_PER_COORDINATE, _PER_PARAMETER = 1e-7, 1e-9
#: Gradients that one of the density that was fitted takes, that the way of a draw to the model's scale takes, and the
#: seconds on top of both: plain; reparametrised with a search for conditional modes; and without one.
PLAIN, SEARCH, NO_SEARCH = (1.0, 0.0, 0.0), (8.0, 4.0, 6e-4), (2.5, 0.5, 2e-5)


@dataclass(frozen=True)
class Costs:
    """Estimated seconds of single evaluations."""

    #: Of the density that was fitted, with a step of a trajectory.
    gradient: float
    #: Of a draw and its importance weight.
    weight: float
    #: Of the density that was fitted.
    hessian: float


def costs_of(
    density: ModelDensity,
    record: FitRecord | None,
    n_dim: int,
    n_numbers: int,
    coordinates: tuple[float, float, float] = PLAIN,
) -> Costs:
    """Estimate costs from the graph of log p, the sizes of its data, the dimension, and the numbers that define q."""
    one, own = density.gradient_seconds, _PER_COORDINATE * n_dim + _PER_PARAMETER * n_numbers
    gradients, way, more = coordinates
    gradient = gradients * one + more + 0.5 * own
    weight = _LOG_P * one + 2.0 * (way * one + more) + own
    of_hessian = hessian_in_gradients(density, record.n_hessians if record is not None else 0)
    return Costs(gradient, weight, of_hessian * gradient)
