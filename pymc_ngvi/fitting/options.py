"""Options of a fit: its four axes, and which combinations are allowed; all others; and what is filled in for a model.

family = structure of q; update = parametrisation and step map; estimator = how E_q[grad log p] and E_q[-hess log p] are
estimated; step = how far to go and when to stop. Names in error messages and documentation come from the registries.
"""

import functools
import inspect
import itertools

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Concatenate, Literal, Never, TypeGuard, get_args

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.draws import BASE_DRAWS
from pymc_ngvi.core.linalg import fits_in_memory
from pymc_ngvi.core.messages import shortened, suggestion, warn
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Rule
from pymc_ngvi.density import MissingDerivativeError, ModelDensity
from pymc_ngvi.families import (
    COMPONENTS,
    DENSE,
    FAMILIES,
    INDEPENDENT,
    STRUCTURED,
    ComponentsName,
    FamilyName,
    FullState,
    traits_of,
)
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import (
    WITH_FILL,
    WITH_SUMS,
    SparseStructure,
    SummedStructure,
    cheapest_form,
    find_blocks,
    goes_with,
    step_seconds,
    structure_of,
)
from pymc_ngvi.methods import MIXTURE_STEPS, STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS
from pymc_ngvi.methods.schedule import TOL

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


#: What other packages and papers call our entries, by axis; in lower case, without hyphens.
_ENTRIES_ALSO_CALLED = {
    "family": {name: family.traits.also_called for name, family in FAMILIES.items()},
    "estimator": {
        "price": "hessian bonnet",
        "pathwise": "reparam reparameterization reparametrization",
        "score": "reinforce scorefunction blackbox bbvi",
    },
    "step": {"adaptive": "auto"},
}

#: Combinations that are allowed: family, update, estimator, step rule. The first that agrees with what the user chose
#: fills in the rest. Products of gradients are for models of many weights: independent ones, where no family is named.
ALLOWED: tuple[tuple[str, str, str, str], ...] = tuple(
    sorted(
        dict.fromkeys(
            (name, *row)
            for name, family in FAMILIES.items()
            for product in family.traits.goes_with
            for row in itertools.product(*product)
        ),
        key=lambda row: row[2] == "gauss_newton" and row[0] != INDEPENDENT,
    )
)

_NOT_NATURAL = ("natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean")
#: Why others are not, whatever the family: the first whose entries are all in a combination.
_REASONS: tuple[tuple[dict[str, tuple[str, ...]], str], ...] = (
    (
        {"step": ("ivon",), "estimator": ("price", "pathwise", "score", "quadrature")},
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
        {"estimator": ("score",), "update": _NOT_NATURAL},
        "score has the gradients of mean and precision: take update='natural'",
    ),
    (
        {"estimator": ("score",), "step": ("snngm", "adam", "sgd")},
        "score goes with rules for natural parameters: take step='proximal', 'decay' or 'constant'",
    ),
    (
        {"step": ("adaptive",), "estimator": ("stein", "pathwise", "score")},
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
        {"step": ("linesearch",), "estimator": ("price", "stein", "pathwise", "score", "gauss_newton")},
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
        if name is not None:
            _check_word(axis, name, AXES[axis], _ENTRIES_ALSO_CALLED.get(axis))
    agreeing = _agreeing(**chosen)
    if agreeing:
        return agreeing[0]
    given = ", ".join(f"{axis}={name!r}" for axis, name in chosen.items() if name is not None)
    raise ValueError(f"{given} don't go together: {_reason(chosen)}.")


def stochastic_step(**chosen: str | None) -> str | None:
    """Return the step rule that suits what was chosen and evaluates each step on data of its own."""
    return next((choice.step for choice in _agreeing(**chosen) if choice.step not in ON_FIXED_DRAWS), None)


@functools.cache  # each fit asks tens of times
def _agreeing(**chosen: str | None) -> tuple[Choice, ...]:
    """Return the rows of `ALLOWED` that have all that was chosen, in their order."""
    rows = (Choice(*row) for row in ALLOWED)
    return tuple(row for row in rows if all(name in (None, getattr(row, axis)) for axis, name in chosen.items()))


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
    return "no row of pymc_ngvi.fitting.options.ALLOWED has them all"


# --- the values that options take, as types, for signatures, completion and type checkers ---

__all__ = [
    "BaseDrawsName",
    "ComponentsName",
    "EstimatorName",
    "FactorName",
    "FamilyName",
    "PosteriorName",
    "ReparamName",
    "StepName",
    "UpdateName",
]

UpdateName = Literal["natural", "natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean"]
EstimatorName = Literal["price", "stein", "pathwise", "score", "gauss_newton", "quadrature"]
StepName = Literal["adaptive", "linesearch", "constant", "decay", "proximal", "snngm", "adam", "sgd", "ivon"]
BaseDrawsName = Literal["sobol", "antithetic", "plain"]
FactorName = Literal["covariance", "precision"]
PosteriorName = Literal["auto", "gaussian", "exact", "nested", "moved"]
ReparamName = Literal["rvb1", "rvb2", "noncentred"]

# --- options of a fit: validated once, frozen ---

#: Iterations at most, where the user says nothing.
MOST_ITERATIONS = 10_000
#: Stands for a family that is chosen for the model.
AUTO = "auto"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_positive(value: object) -> TypeGuard[float]:
    return _is_number(value) and bool(0 < value < np.inf)


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _checked(is_valid: Callable[[Any], bool], convert: Callable[[Any], Any], what: str) -> dict[str, Any]:
    """Return how an option is checked, as the metadata of its field: None stays."""

    def check(name: str, value: object) -> Any:
        if value is not None and not is_valid(value):
            raise ValueError(f"{name} {what}; got {value!r}.")
        return None if value is None else convert(value)

    return {"check": check}


_NUMBER = _checked(_is_positive, float, "should be a positive number")
_EXPONENT = _checked(lambda v: _is_number(v) and bool(0 <= v <= 1), float, "is an exponent from 0 (no decay) to 1")
_COUNT = _checked(_is_count, int, "should be a whole number of at least 1")
_NUMBER_OF_COMPONENTS = _checked(
    lambda v: v == AUTO if isinstance(v, str) else _is_count(v),
    lambda v: v if isinstance(v, str) else int(v),
    "should be 'auto' or a whole number of at least 1",
)


def _check_word(name: str, value: object, words: Collection[str], also_called: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a value that is none of those that an option has."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"Unknown {name} {value!r}: {suggestion(value, words, also_called)}")


@stored("fit.options")
@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What can be chosen about a fit, beside the model, the start and the seed: checked and filled in when it is made.

    The one list of these options: their types, defaults and order are those of `NGVI` and `fit_ngvi`, whose
    documentation says what they mean. None, for those that have a default of their own, stays only where the choice of
    family, update, estimator and step rule does not use them, or where the step rule knows.
    """

    family: FamilyName | None = None
    update: UpdateName | None = None
    estimator: EstimatorName | None = None
    step: StepName | None = None
    tol: float = TOL
    n_draws: int | None = field(default=None, metadata=_COUNT)
    max_draws: int | None = field(default=None, metadata=_COUNT)
    base_draws: BaseDrawsName | None = None
    stl: bool = True
    step_size: float | None = field(default=None, metadata=_NUMBER)
    step_decay: float | None = field(default=None, metadata=_EXPONENT)
    window: int | None = field(default=None, metadata=_COUNT)
    factor: FactorName | None = None
    blocks: Sequence[Sequence[str]] | None = None
    reparam: ReparamName | None = None
    posterior: PosteriorName = "auto"
    max_seconds: float | None = None
    n_components: int | Literal["auto"] | None = field(default=None, metadata=_NUMBER_OF_COMPONENTS)
    components: ComponentsName | None = None
    #: Why the family was chosen, where the user named none; the user can't give it.
    family_reason: str = ""

    def __post_init__(self) -> None:
        """Check each option, and fill in those that follow from others."""
        choice = self.choice
        if not _is_positive(self.tol):
            raise ValueError(f"tol is in nats of ELBO and should be a positive number; got {self.tol!r}.")
        if not isinstance(self.stl, bool | np.bool_):
            raise ValueError(f"stl should be True or False; got {self.stl!r}.")
        for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.traits.options):
            families = [f for f, family in FAMILIES.items() if name in family.traits.options]
            if getattr(self, name) is not None and choice.family not in families:
                one = " or ".join(map(repr, families))
                goes_with = "are those" if name.endswith("s") else "is that"
                raise ValueError(f"{name} {goes_with} of family={one}; the family is {choice.family!r}.")
        is_gaussian = traits_of(choice.family).is_gaussian
        if self.reparam is not None:
            _check_word("reparam", self.reparam, get_args(ReparamName))
            if not is_gaussian:
                raise ValueError(
                    f"reparam={self.reparam!r} standardises group effects for one Gaussian; family={choice.family!r} "
                    "works on the model's own coordinates: leave one of them out."
                )
            if choice.estimator == "gauss_newton":
                raise ValueError("gauss_newton works on the model's own coordinates: leave reparam out.")
        _check_word("posterior", self.posterior, get_args(PosteriorName))
        if self.posterior not in ("auto", "gaussian") and (self.reparam or not is_gaussian):
            other = f"reparam={self.reparam!r}" if is_gaussian else f"family={choice.family!r}"
            raise ValueError(
                f"posterior={self.posterior!r} begins from a Gaussian on the model's own coordinates: leave {other} "
                "out."
            )
        if self.max_seconds is not None and not _is_positive(self.max_seconds):
            raise ValueError(
                "max_seconds counts estimated seconds of the whole call and should be a positive number; got "
                f"{self.max_seconds!r}. Leave it out for the default: what follows a Gaussian fit takes three times as "
                "long at most, and 20 s."
            )
        if self.base_draws is not None:
            _check_word("base_draws", self.base_draws, BASE_DRAWS)
        of_rule = {name: getattr(self, name) for name in OF_RULE}
        of_rule |= {name: check(name, of_rule[name]) for name, check in _CHECKS.items()}
        _check_rule_takes(choice, of_rule, step_is_default=self.step is None)
        _check_draws(choice, of_rule)
        factor, components = _checked_factor(choice, self.factor), _checked_components(choice, self.components)
        filled = {**choice.given(), **of_rule, "factor": factor, "components": components}
        filled |= {"tol": float(self.tol), "stl": bool(self.stl)}
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @property
    def choice(self) -> Choice:
        """Family, update, estimator and step rule."""
        given = {axis: getattr(self, axis) for axis in AXES}
        return choose(**given | {"family": None if self.family == AUTO else self.family})

    @property
    def rule(self) -> str:
        """What names the step rule: its name, or that of the family that implies it."""
        return f"step={self.step!r}" if self.step else f"family={self.family!r}"

    def of_rule(self) -> dict[str, object]:
        """Return the options of the step rule that were given."""
        given = {name: getattr(self, name) for name in OF_RULE}
        return {name: value for name, value in given.items() if value is not None}

    def changed(self, **options: Any) -> "FitOptions":
        """Return these options with some replaced, checked anew; None leaves an option as it is."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    def with_draws(self) -> "FitOptions":
        """Return these options with draws in place of exact expectations, where they ask for these."""
        return replace(self, estimator=None, step=None) if self.choice.estimator == "quadrature" else self

    def has_other_states(self, other: "FitOptions") -> bool:
        """Tell whether approximations have another form than with other options."""
        names = ("factor", "blocks", "reparam", "components")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return not same or self.choice.family != other.choice.family


#: Options that the user gives, in order, with their defaults; those of the step rules among them, and how each of these
#: is checked.
OPTIONS = {option.name: option.default for option in fields(FitOptions) if option.name != "family_reason"}
_CHECKS = {option.name: option.metadata["check"] for option in fields(FitOptions) if "check" in option.metadata}
OF_RULE = tuple(name for name in OPTIONS if name in {*_CHECKS, "base_draws"})
#: Arguments of `NGVI`.
OF_CONSTRUCTOR = ("model", "shards", "batches", "random_seed", "start", "start_sigma", *OPTIONS)


def _checked_components(choice: Choice, components: str | None) -> str | None:
    """Return what the components of a mixture are."""
    if components is None:
        return next(iter(COMPONENTS)) if traits_of(choice.family).has_components else None
    _check_word("components", components, COMPONENTS)
    of_covariance = [name for name, family in COMPONENTS.items() if "covariance" in family.traits.factors]
    if components not in of_covariance and choice.update != "natural":
        raise ValueError(
            f"{components.capitalize()} components take steps in the precision itself: take update='natural', not "
            f"{choice.update!r}, or components={' or '.join(map(repr, of_covariance))}."
        )
    return components


def _checked_factor(choice: Choice, factor: str | None) -> str:
    """Return what the Cholesky factor is of."""
    # Euclidean gradients do far better in a factor of the precision; for independent blocks it is no other family.
    factors = traits_of(choice.family).factors
    either = choice.update == "euclidean" and len(factors) > 1
    of_precision = choice.update == "cholesky_precision" or factors == ("precision",)
    own = "precision" if of_precision or either else "covariance"
    if not (factor is None or (isinstance(factor, str) and factor in ("covariance", "precision"))):
        raise ValueError(f"factor should be 'covariance' or 'precision'; got {factor!r}.")
    if factor in (None, own) or either:
        return factor or own
    if factors == ("precision",):
        raise ValueError(f"family={choice.family!r} has a factor of the precision; got factor={factor!r}.")
    if choice.update != "euclidean":
        raise ValueError(
            f"update={choice.update!r} works on a factor of the {own}; factor={factor!r} goes with "
            "update='euclidean'" + (" and update='cholesky_precision'." if factor == "precision" else ".")
        )
    both = [repr(name) for name, family in FAMILIES.items() if len(family.traits.factors) > 1]
    raise ValueError(
        f"factor='precision' is for family={' or '.join(both)}: for {choice.family!r} it would be the same family "
        "again."
    )


def _check_rule_takes(choice: Choice, of_rule: Mapping[str, object], *, step_is_default: bool) -> None:
    """Raise ValueError for an option that the step rule does not use."""
    takes = RULES[choice.step].takes
    own = traits_of(choice.family).own_rule
    for name, value in of_rule.items():
        if value is not None and name not in takes:
            rule = f"family={choice.family!r}" if own else f"step={choice.step!r}"
            default = ", the default here," if step_is_default and not own else ""
            steps = [repr(rule) for rule, kind in AXES["step"].items() if name in kind.takes]
            with_own = {family.traits.own_rule: repr(f) for f, family in FAMILIES.items() if family.traits.own_rule}
            families = [family for rule, family in with_own.items() if name in RULES[rule].takes]
            parts = [f"{axis}={' or '.join(names)}" for axis, names in (("step", steps), ("family", families)) if names]
            raise ValueError(
                f"{rule}{default} does not use {name}={value!r}; it takes {', '.join(sorted(takes)) or 'none'}. "
                f"{name} goes with {', or '.join(parts)}{': name one' * (step_is_default and not own)}."
            )


def _check_draws(choice: Choice, of_rule: Mapping[str, Any]) -> None:
    """Raise ValueError for numbers of draws that the kind of base draws can't have."""
    kind = of_rule["base_draws"] or ("sobol" if choice.step in ON_FIXED_DRAWS else None)
    for name in ("n_draws", "max_draws"):
        value = of_rule[name] or 2  # which all kinds can have
        if kind == "sobol" and (value < 2 or value & (value - 1)):
            raise ValueError(
                f"{name} should be a power of 2, at least 2 (draws are quasi-random, in pairs); got {value!r}."
            )
        if kind == "antithetic" and value % 2:
            raise ValueError(f"{name} should be even (antithetic draws come in pairs); got {value!r}.")
    n_draws, max_draws = of_rule["n_draws"], of_rule["max_draws"]
    if max_draws is not None and max_draws < (n_draws or 1):
        raise ValueError(f"max_draws={max_draws} is below n_draws={n_draws}; raise it or lower n_draws.")


def check_n(n: object) -> int:
    """Return the number of iterations as an int; raise ValueError for a negative or broken number."""
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0:
        raise ValueError(f"n is the maximum number of iterations, a whole number of at least 0; got {n!r}.")
    return int(n)


def check_callbacks(callbacks: Any) -> list[Callable[..., object]]:
    """Return the callbacks as a list; raise TypeError for anything that can't be called."""
    if callable(callbacks):
        name = getattr(callbacks, "__name__", type(callbacks).__name__)
        raise TypeError(f"callbacks should be a list of functions; got one function: write [{name}].")
    listed = list(callbacks or [])
    if wrong := [callback for callback in listed if not callable(callback)]:
        raise TypeError(f"callbacks should be functions of (approx, losses, i); got {wrong[0]!r}.")
    return listed


# --- the family for a model, where the user names none: by what a step would cost, and whether it fits in memory ---

#: Dimensions below which a dense covariance costs nothing worth saving, and below which it costs less in any case.
_SMALL, _LESS = 40, 48


def choose_family(density: ModelDensity, *, may_fill: bool = False, may_sum: bool = False) -> tuple[str, str]:
    """Return the family that suits a model."""
    n_dim = density.n_dim
    if n_dim < _SMALL:
        return DENSE, ""
    dense_fits = fits_in_memory(FullState.memory_bytes(n_dim))
    form = form_of(density, fill=may_fill, sums=may_sum)
    if form is None:
        if dense_fits:
            return DENSE, "the Hessian is dense"
        return INDEPENDENT, "the Hessian is dense, and a dense covariance does not fit in memory"
    # Columns of a Hessian that are computed one by one, where blocks share theirs; with fill-in, few.
    n_columns = 0 if isinstance(form, SparseStructure) else len(form.border) + int(max(form.sizes, default=0))
    of_dense = prices.of_dense(n_dim) + prices.PER_COLUMN * n_dim if n_dim >= _LESS else 0.0
    costs_less = step_seconds(form) + prices.PER_COLUMN * n_columns < of_dense or not dense_fits
    if costs_less and fits_in_memory(structure_of(form).memory_bytes(n_dim)):
        return STRUCTURED, in_short(form)
    if dense_fits:
        return DENSE, "a sparse precision would take longer"
    return INDEPENDENT, "neither a dense covariance nor a sparse precision fits in memory"


def form_of(density: ModelDensity, *, fill: bool, sums: bool) -> Partition | SparseStructure | None:
    """Return the form of a sparse precision that costs least; None where the Hessian is dense."""
    if fill:
        return cheapest_form(density.summed if sums else None, lambda: density.pattern)
    return None if density.pattern is None else find_blocks(density.pattern)


def in_short(structure: Partition | SparseStructure) -> str:
    """Return how many coordinates are global and how many blocks there are, or how large a factor with fill-in is."""
    if isinstance(structure, SparseStructure):
        n, rows = structure.n_entries, structure.n_dim
        words = f"a precision whose Cholesky factor has {n:,} entries, {n / rows:,.0f} in a row"
        n_sums = structure.n_sums if isinstance(structure, SummedStructure) else 0
        return words + (f", beside {n_sums} sum{'s'[: n_sums != 1]} over many coordinates" if n_sums else "")
    n, sizes = len(structure.border), structure.sizes
    if not len(sizes):
        return f"all {n:,} coordinates are global"
    least, most = int(sizes[0]), int(sizes[-1])
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    blocks = f"{len(sizes):,} independent block{'s'[: len(sizes) != 1]} of size {size}"
    return f"{n:,} global coordinate{'s'[: n != 1]}, {blocks}"


# --- choices that the user left open and that depend on the model: minibatches, and missing second derivatives ---

#: Weights of a network beyond which momentum and limited steps lead further in a few passes than averages do.
_MANY_WEIGHTS = 5_000
#: Directions in which functions of rows may vary, beyond which draws of all coordinates are the quicker.
_FEW_DIRECTIONS = 5
#: Families whose form is known before the data are read, and that take exact expectations.
_OF_BATCHES = tuple(
    name
    for name, family in FAMILIES.items()
    if not family.traits.from_structure
    and any("quadrature" in product.estimators for product in family.traits.goes_with)
)
#: Options by name, as users give them.
type Given = Mapping[str, Any]


def options_for(given: Given, density: ModelDensity | None = None) -> FitOptions:
    """Check what was given, and fill in what was not."""
    given = {name: given.get(name, default) for name, default in OPTIONS.items()}
    filled = dict(given)
    if given["posterior"] == AUTO and names_a_method(given):
        filled["posterior"] = "gaussian"
    if density is None:
        return FitOptions(**filled)
    if density.is_streamed:
        filled |= _for_batches(given)
    if given["family"] in (None, AUTO):
        filled |= _family_for(given, density)
    if traits_of(given["family"] or "").has_components and given["components"] is None:
        name, reason = choose_family(density)
        if _go_together({**given, "components": name}):
            _warn_of_makeshift(
                name,
                reason,
                "Components get diagonal covariances, which ignore correlations: {}. Name components for others.",
            )
            filled["components"] = name
    if density.has_minibatch and given["step"] is None:
        filled["step"] = stochastic_step(**{axis: filled[axis] for axis in AXES})
    if given["estimator"] == "gauss_newton" and density.n_dim > _MANY_WEIGHTS:
        filled |= {"step": "ivon"} if given["step"] is None and _go_together({**filled, "step": "ivon"}) else {}
    if _goes_by_rows(given, filled, density):
        filled["estimator"] = "quadrature"
    options = FitOptions(**filled)
    if density.has_minibatch and options.choice.step in ON_FIXED_DRAWS:
        raise ValueError(
            f"{options.rule} compares ELBOs on the same data, and the model reads pm.Minibatch data, "
            "which differ from one evaluation to the next: leave it out, or take step='decay' or 'constant' with a "
            "Gaussian family, or the full data."
        )
    error = density.hessian_error() if options.choice.estimator == "price" else None
    return options if error is None else _without_hessians(given, filled, error)


def _for_batches(given: Given) -> Mapping[str, str]:
    """Return what goes with data in batches: expectations by quadrature, and a Gaussian."""
    wanted = {"update": "natural", "estimator": "quadrature", "step": "linesearch", "reparam": None}
    for name, value in wanted.items():
        if given[name] not in (None, value):
            raise ValueError(
                f"batches= takes natural steps with expectations by quadrature: leave {name}={given[name]!r} out. "
                "pm.Minibatch goes with stochastic step rules."
            )
    if given["posterior"] not in (AUTO, "gaussian"):
        raise ValueError(
            f"posterior={given['posterior']!r} takes draws of log p on all data, which are not in memory: with "
            "batches, leave it out."
        )
    if given["family"] not in (None, AUTO, *_OF_BATCHES):
        raise ValueError(f"batches= goes with family={' or '.join(map(repr, _OF_BATCHES))}; got {given['family']!r}.")
    return {"estimator": "quadrature", "posterior": "gaussian"}


def names_a_method(given: Given) -> bool:
    """Tell whether a method was named, whose result nothing is to be done to."""
    named = [given[name] for name in (*AXES, "reparam") if name != "family"]
    return given["family"] not in (None, AUTO) or any(value is not None for value in named)


def _may_go_by_rows(given: Given, filled: Given) -> bool:
    """Tell whether exact expectations of rows go with what was given, and nothing that was asks for draws."""
    if any(given[name] is not None for name in (*OF_RULE, "estimator", "step", "reparam")) or not given["stl"]:
        return False
    return _go_together({**filled, "estimator": "quadrature"})


def _go_together(given: Given) -> bool:
    """Tell whether there are such options."""
    try:
        FitOptions(**given)
    except ValueError:
        return False
    return True


def _goes_by_rows(given: Given, filled: Given, density: ModelDensity) -> bool:
    """Tell whether a fit takes exact expectations of rows."""
    return filled["estimator"] == "quadrature" or (
        _may_go_by_rows(given, filled) and density.n_directions is not None and density.n_directions <= _FEW_DIRECTIONS
    )


def _family_for(given: Given, density: ModelDensity) -> Mapping[str, str | None]:
    """Return the family that suits the model, and why, where it goes with what was given."""
    families = {choice.family for choice in _agreeing(**{axis: given[axis] for axis in AXES if axis != "family"})}
    if given["estimator"] == "gauss_newton" or len(families) == 1:
        return {"family": None}  # as the registry has it, whatever the model
    # Where group effects are told from global parameters, a sparse precision is there for the asking.
    name, reason = (STRUCTURED, "") if given["reparam"] else _chosen(given, density)
    filled = {"family": name, "family_reason": reason}
    if not _go_together({**given, **filled}):
        return {"family": None}  # let the other choices decide
    _warn_of_makeshift(
        name, reason, "q gets a diagonal covariance, which ignores correlations: {}. Name a family for another."
    )
    return filled


def _chosen(given: Given, density: ModelDensity) -> tuple[str, str]:
    """Return the family that suits a model, in the space of its rows where that has far fewer dimensions."""
    steps = [given[name] for name in ("update", "estimator", "step")]
    may_fill = not density.has_minibatch and goes_with(WITH_FILL, *steps)
    may_sum = (
        may_fill and goes_with(WITH_SUMS, *steps) and _goes_by_rows(given, {**given, "family": STRUCTURED}, density)
    )
    name, reason = choose_family(density, may_fill=may_fill, may_sum=may_sum)
    if name in (DENSE, INDEPENDENT) and _may_go_by_rows(given, {**given, "family": DENSE}):
        seen = density.seen_from_rows
        if seen is not None:
            return (
                DENSE,
                f"the data see {len(seen.space.normal):,} coefficients in {seen.space.basis.shape[1]:,} dimensions",
            )
    return name, reason


def _warn_of_makeshift(name: str, reason: str, message: str) -> None:
    if name == INDEPENDENT:  # as nothing better fits in memory
        warn(message.format(reason))


def _without_hessians(given: dict[str, Any], filled: dict[str, Any], error: MissingDerivativeError) -> FitOptions:
    """Take an estimator from gradients alone, if that was left open."""
    if given["estimator"] is not None or given["step"] in ON_FIXED_DRAWS:
        raise error
    chosen = {name: filled.get(name) for name in ("family", "family_reason") if filled.get(name)}
    by_gradients = given | chosen | {"estimator": "stein"}
    if not _go_together(by_gradients):  # what was asked for needs Hessians
        raise error
    options = FitOptions(**by_gradients)
    warn(
        f"{error} The fit goes on with gradients alone (estimator='stein', update={options.choice.update!r}, "
        f"step={options.choice.step!r}), which takes many more iterations."
    )
    return options


# --- signatures that show each option of a fit, which `FitOptions` alone declares; other names are refused ---

#: What stands in a signature for the names that are refused.
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation=Never)
#: Options of stochastic-gradient variational inference, and what takes their place.
_REFUSED = {
    "obj_n_mc": "the number of draws grows by itself; set `n_draws` (the first set) or `max_draws`",
    "tf_n_mc": "there are no test functions; set `n_draws` or `max_draws` for the number of draws",
    "obj_optimizer": "natural-gradient steps need no optimiser and no learning rate; choose a rule with `step`",
    "test_optimizer": "there are no test functions, hence nothing to optimise",
    "more_obj_params": "only the parameters of the approximation are fitted",
    "more_tf_params": "there are no test functions",
    "more_updates": "use `callbacks` to do something after each iteration",
    "more_replacements": "set data with pm.set_data before the fit",
    "total_grad_norm_constraint": "steps are limited by the ELBO itself; nothing is to be clipped",
    "fn_kwargs": "use `compile_kwargs`",
    "seed": "use `random_seed`",
    "random_state": "use `random_seed`",
    "draws": "pass it to `approx.sample(draws)`; `n` is the maximum number of iterations",
    "chains": "there is one fit; pass it to `approx.sample(draws, chains=4)`, which arranges draws in chains",
    "cores": "BLAS has the threads that OMP_NUM_THREADS says; data in shards take processes",
    "tune": "nothing is tuned; `n` is the maximum number of iterations, and the fit stops by itself",
    "target_accept": "there are no proposals to accept; choose a rule with `step`",
    "init": "use `start` for means, and `start_sigma` for standard deviations",
    "initvals": "use `start`",
    "learning_rate": "the default needs none; rules with a constant step take `step_size`",
    "cost_part_grad_scale": "the ELBO is not split",
    "scale_cost_to_minibatch": "minibatches are always scaled to their `total_size`",
    "local_rv": "all free variables share one approximation",
}
#: Other words for options: those of other packages.
_ALSO_CALLED = {
    "n": "niter niterations numiterations iterations maxiter maxiters maxiterations nsteps numsteps steps epochs",
    "n_draws": "nsamples numsamples nmc samples elbosamples mcsamples",
    "tol": "tolerance tolrelobj",
    "progressbar": "progress showprogress verbose",
    "backend": "compiler",
    "family": "approximation guide",
}


def takes[**P, R](arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Let a method show the fields of a dataclass as its arguments."""

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        declared = inspect.signature(arguments).parameters
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        sign(method, [itself, *(declared[name] for name in OF_CONSTRUCTOR), _UNKNOWN])
        return method

    return decorate


def sign(function: Callable[..., object], parameters: list[inspect.Parameter]) -> None:
    """Give a function other parameters to show; what it returns stays."""
    function.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]


def joined_parameters(first: list[inspect.Parameter], *methods: Callable[..., object]) -> list[inspect.Parameter]:
    """Return some parameters, and after them, by keyword, those that methods take and that are not among them."""
    found: Mapping[str, inspect.Parameter] = {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for method in methods
        for name, parameter in inspect.signature(method).parameters.items()
        if name not in ("self", "unknown")
    }
    known = [parameter.name for parameter in first]
    return [*first, *(p for name, p in found.items() if name not in known), _UNKNOWN]


def split_options(
    options: Mapping[str, Any], constructor: Callable[..., object], method: Callable[..., object]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a constructor takes, and those of a method; raise TypeError for any other."""
    refuse_unknown(options, constructor, method)
    of_method = inspect.signature(method).parameters
    return (
        {name: value for name, value in options.items() if name not in of_method},
        {name: value for name, value in options.items() if name in of_method},
    )


def refuse_unknown(given: Mapping[str, object], *accepted_by: Callable[..., object]) -> None:
    """Raise TypeError for the first option that none of the callables takes, with what to use instead."""
    valid = {
        name
        for function in accepted_by
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self"
    }
    for name in given:
        if name in _REFUSED:
            value = "" if callable(given[name]) else f"={shortened(given[name])}"
            raise TypeError(f"method 'ngvi' does not take {name}{value}: {_REFUSED[name]}.")
        if name not in valid:
            also_called = {option: words for option, words in _ALSO_CALLED.items() if option in valid}
            listed = suggestion(name, sorted(valid), also_called)
            raise TypeError(f"method 'ngvi' does not know the option {name!r}: {listed}")
