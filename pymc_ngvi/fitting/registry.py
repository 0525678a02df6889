"""The four axes of a fit, and which combinations are allowed.

family = structure of q; update = parametrisation and step map; estimator = how E_q[grad log p] and E_q[-hess log p] are
estimated; step = how far to go and when to stop. Names in error messages and documentation come from these dicts.
"""

import functools
import itertools

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Rule
from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import FAMILIES, INDEPENDENT, traits_of
from pymc_ngvi.mixtures import MIXTURE_STEPS
from pymc_ngvi.steps import STEPS
from pymc_ngvi.updates import UPDATES

#: Step rules, those that a family implies among them.
RULES: dict[str, type[Rule]] = {**STEPS, **MIXTURE_STEPS}

#: What users name.
AXES: dict[str, Mapping[str, Any]] = {
    "family": FAMILIES,
    "update": UPDATES,
    "estimator": ESTIMATORS,
    "step": STEPS,
}

#: Rules that solve a problem on fixed draws, with all of the data in every evaluation.
ON_FIXED_DRAWS = ("adaptive", "linesearch", *MIXTURE_STEPS)
#: Estimators that do without the Hessian of log p.
BY_GRADIENTS = ("stein", "pathwise", "gauss_newton")


def _rows() -> tuple[tuple[str, str, str, str], ...]:
    rows = [
        (name, *row)
        for name, family in FAMILIES.items()
        for product in family.traits.goes_with
        for row in itertools.product(*product)
    ]
    # Products of gradients are for models of many weights: independent ones, where no family is named.
    rows.sort(key=lambda row: row[2] == "gauss_newton" and row[0] != INDEPENDENT)
    return tuple(dict.fromkeys(rows))


#: What other packages and papers call our entries, by axis; in lower case, without hyphens.
_ALSO_CALLED = {
    "family": {name: family.traits.also_called for name, family in FAMILIES.items()},
    "estimator": {"price": "hessian bonnet", "pathwise": "reparam reparameterization reparametrization"},
    "step": {"adaptive": "auto"},
}

#: Combinations that are allowed: family, update, estimator, step rule. The first that agrees with what the user chose
#: fills in the rest.
ALLOWED: tuple[tuple[str, str, str, str], ...] = _rows()

_NOT_NATURAL = ("natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean")
#: Why others are not, whatever the family: the first whose entries are all in a combination.
_REASONS: tuple[tuple[dict[str, tuple[str, ...]], str], ...] = (
    (
        {"step": ("ivon",), "estimator": ("price", "pathwise", "quadrature")},
        "ivon averages noisy curvatures over many iterations: take estimator='stein' or 'gauss_newton'",
    ),
    (
        {
            "estimator": ("gauss_newton",),
            "update": _NOT_NATURAL,
        },
        "gauss_newton replaces the curvature in the natural-parameter update: take update='natural'",
    ),
    (
        {"step": ("ivon",), "update": ("natural", "cholesky", "cholesky_precision", "sqrt", "euclidean")},
        "ivon takes noisy steps in precisions, which have to stay positive: take update='natural_pd'",
    ),
    (
        {"estimator": ("gauss_newton",), "step": ("adaptive", "snngm", "adam", "sgd")},
        "gauss_newton goes with rules for natural parameters: take step='constant', 'decay', 'proximal' or 'ivon'",
    ),
    (
        {"step": ("adaptive",), "estimator": ("stein", "pathwise")},
        "adaptive maximises the ELBO on fixed draws, for which curvatures must be those of log p; gradients alone "
        "overfit draws that are fewer than the dimensions: take estimator='price', or another step rule",
    ),
    (
        {"estimator": ("quadrature",), "update": _NOT_NATURAL},
        "quadrature gives exact expectations, which go with natural gradients: take update='natural'",
    ),
    (
        {"estimator": ("quadrature",), "step": tuple(name for name in STEPS if name != "linesearch")},
        "quadrature gives exact expectations, for which there is a line search: take step='linesearch'",
    ),
    (
        {"step": ("linesearch",), "estimator": ("price", "stein", "pathwise", "gauss_newton")},
        "linesearch needs an ELBO without noise: take estimator='quadrature'",
    ),
    (
        {"step": ("linesearch",), "update": _NOT_NATURAL},
        "linesearch goes along natural gradients: take update='natural'",
    ),
    (
        {"step": ("adaptive",), "update": ("euclidean",)},
        "adaptive starts from steps of size 1, which are right for natural gradients only: take step='adam'",
    ),
    (
        {
            "step": ("decay", "proximal"),
            "update": _NOT_NATURAL,
        },
        "decay and proximal are rules for natural parameters: take update='natural', or step='constant'",
    ),
    (
        {"step": ("snngm", "adam", "sgd"), "update": ("natural", "natural_pd", "sqrt")},
        "snngm, adam and sgd add to the coordinates of a Cholesky factor, where precisions would not stay positive "
        "definite: take update='cholesky', 'cholesky_precision' or 'euclidean'",
    ),
    (
        {"step": ("sgd",), "update": ("cholesky", "cholesky_precision")},
        "sgd is plain Euclidean ascent; the same along natural gradients is step='constant'",
    ),
    (
        {"step": ("constant",), "update": ("euclidean",)},
        "a constant step along the Euclidean gradient is step='sgd'",
    ),
    (
        {"step": ("snngm",), "update": ("euclidean",)},
        "snngm normalises natural gradients: take update='cholesky' or 'cholesky_precision'",
    ),
)


@stored("fit.choice")
@dataclass(frozen=True)
class Choice:
    """One entry on each axis; as a step rule, also one that the family implies."""

    family: str
    update: str
    estimator: str
    step: str

    def given(self) -> dict[str, str]:
        """Return the entries by axis as a user names them, without a step rule that the family implies."""
        return {axis: name for axis, name in vars(self).items() if name in AXES[axis]}


_CHOICES = [Choice(*row) for row in ALLOWED]


def choose(**chosen: str | None) -> Choice:
    """Fill in the axes that the user left open.

    Parameters
    ----------
    **chosen : str or None
        ``family``, ``update``, ``estimator``, ``step``.

    Returns
    -------
    Choice
        The first row of `ALLOWED` that agrees.

    Raises
    ------
    ValueError
        For an unknown name, or a combination that is not allowed; both say what is.

    Examples
    --------
    >>> choose(family="diagonal").update
    'natural'
    """
    if chosen.get("step") in MIXTURE_STEPS:
        step = chosen["step"]
        family = next(name for name, family in FAMILIES.items() if family.traits.own_rule == step)
        raise ValueError(
            f"step={step!r} is the rule of family={family!r}, which implies it: name the family, and leave step out."
        )
    for axis, name in chosen.items():
        if name is not None and (not isinstance(name, str) or name not in AXES[axis]):
            raise ValueError(f"Unknown {axis} {name!r}: {suggestion(name, AXES[axis], _ALSO_CALLED.get(axis))}")
    agreeing = _agreeing(chosen)
    if agreeing:
        return agreeing[0]
    given = ", ".join(f"{axis}={name!r}" for axis, name in chosen.items() if name is not None)
    raise ValueError(f"{given} don't go together: {_reason(chosen)}.")


def stochastic_step(**chosen: str | None) -> str | None:
    """Return the step rule that suits what was chosen and evaluates each step on data of its own."""
    return next((choice.step for choice in _agreeing(chosen) if choice.step not in ON_FIXED_DRAWS), None)


def only_family(**chosen: str | None) -> str | None:
    """Return the family, where what was chosen goes with no other."""
    families = {choice.family for choice in _agreeing(chosen)}
    return families.pop() if len(families) == 1 else None


def _agreeing(chosen: Mapping[str, str | None]) -> tuple[Choice, ...]:
    """Return the rows of `ALLOWED` that have all that was chosen, in their order."""
    return _agreeing_with(*[(axis, name if isinstance(name, str) else None) for axis, name in chosen.items()])


@functools.cache
def _agreeing_with(*chosen: tuple[str, str | None]) -> tuple[Choice, ...]:
    return tuple(row for row in _CHOICES if all(name in (None, getattr(row, axis)) for axis, name in chosen))


def _reason(chosen: Mapping[str, str | None]) -> str:
    """Return why a combination is not allowed."""
    traits = traits_of(chosen.get("family") or "")
    for refusal in traits.refuses:
        for_update = not refusal.update or chosen.get("update") in refusal.update
        if chosen.get(refusal.axis) in refusal.names and for_update:
            return refusal.sentence
    if traits.own_rule and chosen.get("step") is not None:
        return f"family={traits.name!r} has a step rule of its own: leave step out"
    for entries, sentence in _REASONS:
        if all(chosen.get(axis) in names for axis, names in entries.items()):
            return sentence
    return "no row of pymc_ngvi.fitting.registry.ALLOWED has them all"
