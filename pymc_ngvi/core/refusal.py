"""What can't be had for a model or a fit, and why: a code to decide by, and a sentence to read."""

from enum import StrEnum, auto
from typing import ClassVar


class Reason(StrEnum):
    """Why something can't be had. What is decided is decided by it, never by the words of a sentence."""

    # Of an exact or nested posterior.
    NOT_FOLLOWED = auto()  # the fit did not end where another posterior may follow
    IN_PART = auto()  # log p is not to be had with all of the data in one place
    NO_FOREST = auto()  # coordinates do not fall into small blocks beside few globals
    NOT_LATENT = auto()  # no latent Gaussian model
    NOT_SPLIT = auto()  # terms of log p can't be taken apart, or compiled one by one
    SINGULAR = auto()  # a covariance
    HOPELESS = auto()  # draws do not come near the posterior
    TOO_LONG = auto()  # each draw takes many evaluations
    TOO_DEAR = auto()  # it takes more seconds than there are
    NOT_PASSED = auto()  # a check of its weights
    ELSEWHERE = auto()  # the same of few parameters: there is mass where a Gaussian may have no draws
    EXCEPTION = auto()  # an error in its code
    SUPERFLUOUS = auto()  # the Gaussian is the posterior
    # Of log p as a sum over rows.
    NO_PREDICTORS = auto()  # no sum over functions of a few linear predictors
    NOT_ALL_ROWS = auto()  # a part of log p is no row
    NOT_LIFTED = auto()  # an element depends on too much, or in a way that is not understood
    # Of derivatives.
    NO_HESSIANS = auto()  # at points
    NO_RULE = auto()  # an operation is not known, or has no derivative
    NO_LAYERS = auto()  # rows are not kept apart by an operation
    # Of what was built of a model.
    NOT_REUSED = auto()  # the next fit needs something else
    # Of the form in which values were asked for.
    OTHER_FORM = auto()
    ROWS_GIVEN_UP = auto()


class Refused(Exception):
    """Something can't be had.

    Parameters
    ----------
    code : Reason
        To decide by.
    sentence : str
        To read: a clause or a sentence.
    """

    def __init__(self, code: Reason, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code, self.sentence = code, sentence

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


class RefusedFor(Refused):
    """A refusal whose class has one reason."""

    reason: ClassVar[Reason]

    def __init__(self, sentence: str) -> None:
        super().__init__(self.reason, sentence)
        self.args = (sentence,)  # from which it is made in another process


class NotApart(RefusedFor):
    """A log density does not come apart into functions of a few linear predictors."""

    reason = Reason.NO_PREDICTORS


class TooDenseError(NotApart):
    """Sets of coordinates would fill the memory."""

    def __init__(self, sentence: str = "covariances of predictors would take too much memory") -> None:
        super().__init__(sentence)


class OtherForm(RefusedFor):
    """Values are not to be had in the form that was begun with: what needs them begins again."""

    reason = Reason.OTHER_FORM


class PatternWidened(OtherForm):
    """The Hessian had entries outside its pattern, which has them now: values have another form."""


class PatternLacks(OtherForm):
    """The Hessian has entries outside its pattern, which still lacks them."""


class RowsGivenUp(OtherForm):
    """Rows are not all of log p: it is evaluated without them from now on."""


class RowHessianGivenUp(OtherForm):
    """Second derivatives of rows are not those of log p: its Hessian, and the pattern, are found without them."""


class Unavailable(Refused):
    """A posterior of some kind can't be had."""

    def __init__(self, code: Reason, sentence: str, on_request: str = "") -> None:
        super().__init__(code, sentence)
        self.on_request = on_request


class Failed(Unavailable):
    """It was tried, and a check of it failed."""
