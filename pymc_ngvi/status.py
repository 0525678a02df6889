"""How a fit ended: one sentence on what happened, one on what to do about it."""

from enum import Enum


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
        "The ELBO still to be gained within this family is below the tolerance, as measured on fresh draws.",
        "Nothing to do; khat() says how near the family comes to the posterior.",
    )
    NOISE_LIMITED = (
        "noise-limited",
        "The Monte Carlo noise at the largest number of draws hides whether the tolerance is met.",
        "Raise max_draws; heavy noise also means a posterior far from Gaussian: look at khat(), "
        "or reparametrise (non-centred hierarchies, standardised predictors).",
    )
    STALLED = (
        "stalled",
        "No step raises the ELBO any more although the estimated gap is above the tolerance.",
        "Give another start or start_sigma, standardise the predictors, or reparametrise the model; "
        "the result is kept but may be far from the optimum.",
    )
    MAX_ITERATIONS = (
        "iteration limit",
        "The limit of n iterations was reached before convergence.",
        "Call refine(n) to go on from here.",
    )
    INTERRUPTED = (
        "interrupted",
        "The fit was interrupted from the keyboard; the current approximation is kept.",
        "Call refine(n) to go on from here.",
    )
    STOPPED = (
        "stopped by a callback",
        "A callback raised StopIteration; the current approximation is kept.",
        "Call refine(n) to go on from here.",
    )

    def __init__(self, label: str, sentence: str, cure: str) -> None:
        self.label = label
        self.sentence = sentence
        self.cure = cure

    def __str__(self) -> str:
        """Return the short name."""
        return self.label

    @property
    def resumable(self) -> bool:
        """Whether a fit that ended so goes on where it was when resumed."""
        return self in (Status.NOT_STARTED, Status.MAX_ITERATIONS, Status.INTERRUPTED, Status.STOPPED)


class ConvergenceWarning(UserWarning):
    """The fit ended before it converged; the message says why and what to do."""


class StartError(ValueError):
    """The log density is not finite anywhere near the starting point."""
