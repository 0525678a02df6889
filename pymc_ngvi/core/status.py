"""What comes of a fit: its ELBO, in nats, and how it ended."""

import math

from enum import Enum
from typing import NamedTuple

from pymc_ngvi.core.stored import stored

#: Numbers from here on are shown by their order of magnitude.
_HUGE = 1e9


@stored("fit.elbo")
class Elbo(NamedTuple):
    """Evidence lower bound, estimated on draws that had no part in the fit, or found by quadrature.

    Parameters
    ----------
    value : float
        In nats.
    se : float
        Monte Carlo standard error; of quadrature, the error at most.
    """

    value: float
    se: float

    def __str__(self) -> str:
        """Return ``-625.61 +- 0.01``."""
        error = f"+- {self.se:{'.2f' if self.se < _HUGE else '.1g'}}"
        return f"{format_elbo(self.value)} {'(its error is not known)' if math.isinf(self.se) else error}"


def format_elbo(nats: float) -> str:
    """Return an ELBO as text: to a hundredth, or, where it is huge, to its order of magnitude."""
    return f"{nats:,.2f}" if abs(nats) < _HUGE else f"{nats:.3g}"


def format_gap(nats: float, unit: str = "") -> str:
    """Return a gap in nats as text: to a thousandth, or, where it is large, to its order of magnitude."""
    return "unknown" if math.isnan(nats) else (f"{nats:.3f}" if nats < 100 else f"{nats:.1e}") + unit


# --- how a fit ended: one sentence on what happened, one on what to do about it ---


@stored("fit.status")
class Status(Enum):
    """Outcome of a fit; `str(status)` is its name, `status.sentence` and `status.cure` say more."""

    NOT_STARTED = (
        "not started",
        "No iteration was run: this is the starting approximation.",
        "Call refine(n), or fit with n > 0.",
    )
    RUNNING = (
        "running",
        "The fit is under way.",
        "Wait for it, or stop it from a callback with StopIteration.",
    )
    CONVERGED = (
        "converged",
        "The ELBO still to be gained within this family is below the tolerance.",
        "Nothing to do; diagnose() says whether the approximation is close enough to the posterior.",
    )
    LEVELLED = (
        "levelled off",
        "The ELBO has stopped rising, but more than the tolerance is still to be gained, or it is not known how much.",
        "approx.gap is what is left, in nats, if that is known. With stochastic step rules: more n_draws, a longer "
        "window, a smaller step_size (if the rule takes one), or step='adaptive' on the full data. With a diagonal or "
        "block family: a smaller tol, more n_draws, or family='full'.",
    )
    NOISE_LIMITED = (
        "noise-limited",
        "The Monte Carlo noise at the largest number of draws hides whether the tolerance is met.",
        "Raise max_draws if little is missing (approx.gap), or if you lowered it. Otherwise the posterior is far "
        "from Gaussian, as with a scale for each coefficient (a horseshoe), and more draws do not help: reparametrise "
        "(non-centred hierarchies, standardised predictors), or use pm.sample; diagnose() says what is wrong.",
    )
    STALLED = (
        "stalled",
        "No step raises the ELBO any more, or none leads to a valid approximation, although the estimated gap is above "
        "the tolerance.",
        "Give another start or start_sigma, standardise the predictors, or reparametrise the model; with stochastic "
        "step rules take a smaller step_size or more n_draws. The result is kept but may be far from the optimum.",
    )
    NO_FINITE_TRIAL = (
        "no finite trial",
        "log p or its gradient is not finite at any of the steps that were tried, however short.",
        "Give a start inside the support, or a smaller start_sigma; give the variables their support by a prior or a "
        "transform rather than by a Potential or by the data; look for overflow (exp of large predictors: standardise "
        "them). The result is kept but may be far from the optimum.",
    )
    OUTSIDE_SUPPORT = (
        "outside the support",
        "At more than 2 % of the draws, log p is not finite: the fit can't be judged, and the ELBO is a mean over the "
        "other draws.",
        "Give the variables their support by a prior or a transform rather than by a Potential or by the data; or use "
        "pm.sample.",
    )
    NOT_SMOOTH = (
        "not smooth",
        "The slopes of log p imply another curvature than its Hessian shows: log p has kinks (a Laplace prior or "
        "likelihood, abs, switch), which exact Hessians do not see; standard deviations are too wide.",
        "Take estimator='quadrature', to which kinks are no obstacle, where log p is a sum over rows; or replace the "
        "kinked term by a smooth one (StudentT in place of Laplace), or use pm.sample.",
    )
    DIVERGED = (
        "diverged",
        "The ELBO is not finite, or far below that of the start.",
        "Leave `step` and `step_size` out, or take a smaller step_size or more n_draws; standardise the predictors, "
        "give a `start` nearer to the posterior, or fit the full data in place of minibatches.",
    )
    UNBOUNDED = (
        "unbounded",
        "Standard deviations keep growing: the posterior may be improper.",
        "Give these variables, or those that they depend on, proper priors (pm.Normal in place of pm.Flat, "
        "pm.HalfNormal in place of pm.HalfFlat); in a logistic regression, a predictor may separate the outcomes. If "
        "the posterior is proper but very wide, rescale the variables.",
    )
    COLLAPSED = (
        "collapsed",
        "A component of the mixture shrank onto a point or ran away: log p rises without limit there, or in that "
        "direction. The last state before it is kept.",
        "Give the scale or the location in question a prior that bounds it, or the mixture fewer components.",
    )
    MAX_ITERATIONS = (
        "iteration limit",
        "The limit of n iterations was reached before convergence.",
        "Call refine(n) to continue from here.",
    )
    OUT_OF_SECONDS = (
        "out of seconds",
        "The estimated seconds that the fit may take were used up before convergence.",
        "Give a larger max_seconds, or call refine() to continue from here.",
    )
    PAUSED = (
        "paused",
        "The fit was paused, so that another posterior could be tried.",
        "Call refine(n) to continue from here.",
    )
    ONE_PASS = (
        "one pass",
        "The data could be read only once, and more than the tolerance is still to be gained.",
        "Give batches that can be read again: an object whose iter() begins anew, or one with __len__ and "
        "__getitem__, such as a list.",
    )
    INTERRUPTED = (
        "interrupted",
        "The fit was interrupted from the keyboard; the result so far is kept.",
        "Call refine(n) to continue, or fit again.",
    )
    STOPPED = (
        "stopped by a callback",
        "A callback raised StopIteration; the current approximation is kept.",
        "Call refine(n) to continue from here.",
    )

    def __init__(self, label: str, sentence: str, cure: str) -> None:
        self.label = label
        self.sentence = sentence
        self.cure = cure

    def __str__(self) -> str:
        """Return the short name."""
        return self.label

    def __repr__(self) -> str:
        """Return what happened, and what to do about it."""
        return f"{self.label[0].upper()}{self.label[1:]}. {self.sentence} {self.cure}"

    @property
    def ended_by_itself(self) -> bool:
        """Whether the step rule ended the fit, for better or worse."""
        return not (self.resumable or self is Status.RUNNING)

    @property
    def can_be_followed(self) -> bool:
        """Whether an exact posterior can begin where a fit ended so: by itself, and not far away, or for it."""
        is_near = self not in (Status.DIVERGED, Status.UNBOUNDED, Status.COLLAPSED)
        return self is Status.PAUSED or (self.ended_by_itself and is_near)

    @property
    def resumable(self) -> bool:
        """Whether a fit that ended so goes on where it was when resumed."""
        return self in (
            Status.NOT_STARTED,
            Status.MAX_ITERATIONS,
            Status.OUT_OF_SECONDS,
            Status.PAUSED,
            Status.INTERRUPTED,
            Status.STOPPED,
        )


class ConvergenceWarning(UserWarning):
    """The fit ended before it converged; the message says why and what to do."""


class DivergedError(RuntimeError):
    """The fit diverged: there is no posterior to draw from; the message says what to do."""


class NotExactError(RuntimeError):
    """An exact posterior was asked for, and a check of it failed; ``approx`` is the Gaussian fit.

    Parameters
    ----------
    message : str
    approx : NGVIApproximation
    """

    def __init__(self, message: str, approx: object) -> None:
        super().__init__(message)
        self.approx = approx


class StartError(ValueError):
    """The log density is not finite anywhere near the starting point."""
