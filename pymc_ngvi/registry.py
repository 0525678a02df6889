"""The four axes of a fit, and which combinations are allowed.

family = structure of q; update = parametrisation and step map; estimator = how E_q[grad log p] and E_q[-hess log p] are
estimated; step = how far to go and when to stop. Names in error messages and documentation come from these dicts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.steps import STEPS
from pymc_ngvi.updates import UPDATES

AXES: dict[str, Mapping[str, Any]] = {
    "family": FAMILIES,
    "update": UPDATES,
    "estimator": ESTIMATORS,
    "step": STEPS,
}

#: Combinations that are allowed. The first row that agrees with what the user chose fills in the rest.
ALLOWED: tuple[tuple[str, str, str, str], ...] = (
    ("full", "natural", "price", "adaptive"),
    ("diagonal", "natural", "price", "adaptive"),
)


@dataclass(frozen=True)
class Choice:
    """One entry on each axis."""

    family: str
    update: str
    estimator: str
    step: str


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
    for axis, name in chosen.items():
        if name is not None and name not in AXES[axis]:
            raise ValueError(f"Unknown {axis} {name!r}: {suggestion(name, AXES[axis])}")
    for row in ALLOWED:
        choice = Choice(*row)
        if all(name is None or getattr(choice, axis) == name for axis, name in chosen.items()):
            return choice
    given = ", ".join(f"{axis}={name!r}" for axis, name in chosen.items() if name is not None)
    rows = "; ".join(", ".join(row) for row in ALLOWED)
    raise ValueError(f"{given} don't go together. Allowed (family, update, estimator, step): {rows}.")


def suggestion(name: str, valid: Any) -> str:
    """Return a sentence that lists the valid names, the nearest first if one is near."""
    near = get_close_matches(str(name), list(valid), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid: {', '.join(repr(v) for v in valid)}."
