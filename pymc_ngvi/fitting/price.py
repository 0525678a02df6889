"""What a call may take, in estimated seconds: from counts of evaluations and the sizes of the data, never from a clock.

The same call then does the same on any machine, and on a busy one.
"""

from dataclasses import dataclass

from pymc_ngvi.density import ModelDensity

#: What may follow a Gaussian fit, in its seconds, and seconds on top: all together, four times the fit and 20 s.
_MOST_WORK, _ALWAYS = 3.0, 20.0
#: The same without groups to integrate over, where a Gaussian is seldom far off.
_ALWAYS_PLAIN = 1.0
#: A Hessian, in gradients, at least, and for each of its products: .2 of a gradient in regressions on many rows, which
#: are products of matrices, to .4 elsewhere.
_HESSIAN, _PER_PRODUCT = 3.0, 0.3
#: Gradients that an expectation over rows takes as long as.
_OF_EXPECTATION = 15.0
#: Gradients and Hessians of a fit by draws.
_N_GRADIENTS, _N_HESSIANS = 1_600, 1_200


def hessian_in_gradients(density: ModelDensity, n_hessians: int) -> float:
    """Return what a Hessian costs; their number is 0 where a fit took none, and nothing is known of them."""
    return max(_HESSIAN, _PER_PRODUCT * float(density.n_products)) if n_hessians else _HESSIAN


def fit_seconds(density: ModelDensity, n_gradients: int, n_hessians: int, estimator: str) -> float:
    """Return the estimated seconds of so many evaluations; with ``"quadrature"``, gradients are expectations."""
    if estimator == "quadrature":
        return _OF_EXPECTATION * n_gradients * density.gradient_seconds
    return (n_gradients + hessian_in_gradients(density, n_hessians) * n_hessians) * density.gradient_seconds


def expected_seconds(density: ModelDensity) -> float:
    """Return the estimated seconds of a fit by draws that is yet to come, with a dense Hessian."""
    n_gradients = _N_GRADIENTS + max(_HESSIAN, _PER_PRODUCT * density.n_dim) * _N_HESSIANS
    return n_gradients * density.gradient_seconds


@dataclass(frozen=True)
class TimeBudget:
    """What a call has taken, and what it may take.

    Parameters
    ----------
    of_fit : float
        Estimated seconds of the Gaussian fit.
    max_seconds : float or None
        Of the whole call, where the user says so.
    """

    of_fit: float
    max_seconds: float | None = None

    def left(self, *, is_plain: bool = False) -> float:
        """Return the estimated seconds that may follow the fit; is_plain: without groups to integrate over."""
        if self.max_seconds is not None:
            return max(self.max_seconds - self.of_fit, 0.0)
        return max(_ALWAYS_PLAIN, _MOST_WORK * self.of_fit) if is_plain else _MOST_WORK * self.of_fit + _ALWAYS

    def asked_for(self, seconds: float) -> str:
        """Return the ``max_seconds`` that would let something follow which takes so many seconds."""
        return f"{_rounded_up(1.2 * (self.of_fit + seconds)):,.0f}".replace(",", "_")


def _rounded_up(seconds: float) -> float:
    """Return a round number that is not less."""
    unit = next(unit for unit in (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 1e12) if seconds < 50.0 * unit)
    return unit * -(-seconds // unit)


def in_words(seconds: float) -> str:
    """Return seconds in words: about 0.4 s, about 40 s, about 12 min."""
    if seconds < 120.0:
        return f"about {seconds:{'.0f' if seconds >= 1.0 else '.1g'}} s"
    if seconds < 7_200.0:
        return f"about {seconds / 60.0:.0f} min"
    return f"about {seconds / 3_600.0:,.0f} h"
