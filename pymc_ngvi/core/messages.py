"""What can't be had for a model or a fit, and why: a code and a sentence; and what messages share."""

import contextlib
import logging
import os
import re
import warnings

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum, auto

import pymc.variational

# --- what messages share: suggestions for names, values cut short, and whose line of code a warning points at ---

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
#: Warnings point at the first caller outside these folders, and the file of decorators.
OURS = (
    *(os.path.join(folder, "") for folder in (_PACKAGE, os.path.dirname(pymc.variational.__file__))),
    contextlib.__file__[:-1],  # CPython does not count a whole name as a prefix
)

#: A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn whoever has called the package."""
    warnings.warn(message, category, skip_file_prefixes=OURS)


def suggestion(name: object, valid: Iterable[str], also_called: Mapping[str, str] | None = None) -> str:
    """Return a sentence that lists the valid names, the one that was meant first if that can be told."""
    valid = list(valid)
    known = {_plain(v): v for v in valid}
    known |= {word: v for v, others in (also_called or {}).items() for word in others.split()}
    near = [known[_plain(name)]] if _plain(name) in known else get_close_matches(str(name), valid, n=1)
    return f"{f'did you mean {near[0]!r}? ' if near else ''}Valid: {', '.join(repr(v) for v in valid)}."


#: Things of one kind that a sentence names, at most.
N_NAMED = 3


def shortened(value: object, length: int = 80) -> str:
    """Return what a value prints as, cut off where that is long."""
    text = repr(value)
    return text if len(text) < length else text[: length - 3] + "..."


def percent(part: float, form: str = ".0f") -> str:
    """Return a part of 1 as a number of per cent."""
    return f"{100 * part:{form}} %"


def listed(names: Sequence[object], form: str = "{!r}", most: int = 5) -> str:
    """Return names for a sentence, the first few of many."""
    shown = ", ".join(form.format(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def checked_names(
    names: str | Iterable[str] | None,
    valid: Iterable[str],
    why: str = "which the model has not",
    option: str = "var_names",
) -> list[str]:
    """Return the names that an option has, each once, or all; raise ValueError for one that is not valid, for none."""
    valid = list(valid)
    names = [names] if isinstance(names, str) else list(dict.fromkeys(valid if names is None else names))
    if unknown := [name for name in names if name not in valid]:
        raise ValueError(f"{option} has {unknown[0]!r}, {why}: {suggestion(unknown[0], valid)}")
    if not names:
        raise ValueError(f"{option} is empty: name at least one variable, or leave it out.")
    return names


def _plain(name: object) -> str:
    return re.sub(r"[\W_]", "", str(name)).lower()


# --- refusals ---


class Reason(StrEnum):
    """Why a posterior can't be had. What is decided is decided by it, never by the words of a sentence."""

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


class Refused(Exception):
    """Something can't be had; the message says why, a clause or a sentence."""

    #: To decide by.
    code = Reason.NOT_LATENT


class NotApart(Refused):
    """A log density does not come apart into functions of a few linear predictors."""


class TooDenseError(NotApart):
    """Sets of coordinates would fill the memory."""

    def __init__(self, sentence: str = "covariances of predictors would take too much memory") -> None:
        super().__init__(sentence)


class OtherForm(Refused):
    """Values are not to be had in the form that was begun with: what needs them begins again."""


class PatternWidened(OtherForm):
    """The Hessian had entries outside its pattern, which has them now: values have another form."""


class RowsGivenUp(OtherForm):
    """Rows are not all of log p: it is evaluated without them from now on."""


class Unavailable(Refused):
    """A posterior of some kind can't be had: what to decide by, a sentence, and which kind is made if asked for."""

    def __init__(self, code: Reason, sentence: str, on_request: str = "") -> None:
        super().__init__(code, sentence)
        self.code, self.sentence, self.on_request = code, sentence, on_request

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


class Failed(Unavailable):
    """It was tried, and a check of it failed."""
