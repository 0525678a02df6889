"""The four axes of a fit, and which combinations are allowed.

family = structure of q; update = parametrisation and step map; estimator = how E_q[grad log p] and E_q[-hess log p] are
estimated; step = how far to go and when to stop. Names in error messages and documentation come from these dicts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.stored import stored
from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.mixtures import MIXTURE_STEPS
from pymc_ngvi.steps import STEPS as SINGLE_STEPS
from pymc_ngvi.updates import UPDATES

STEPS: dict[str, type] = {**SINGLE_STEPS, **MIXTURE_STEPS}

AXES: dict[str, Mapping[str, Any]] = {
    "family": FAMILIES,
    "update": UPDATES,
    "estimator": ESTIMATORS,
    "step": STEPS,
}

_GAUSSIAN = ("full", "diagonal", "block")
_PATH = ("pathwise", "stein")
#: Rules that solve a problem on fixed draws, with all of the data in every evaluation.
ON_FIXED_DRAWS = ("adaptive", "trust_region", "scale_mixture")

#: Families, updates, estimators, step rules whose combinations are allowed. In this order: the first that agrees with
#: what the user chose fills in the rest.
_PRODUCTS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (_GAUSSIAN, ("natural",), ("price",), ("adaptive", "decay", "proximal", "constant")),
    (_GAUSSIAN, ("natural_pd",), ("price",), ("adaptive", "constant")),
    (_GAUSSIAN, ("cholesky",), ("price",), ("adaptive",)),
    (("full",), ("cholesky_precision",), ("price",), ("adaptive",)),
    (_GAUSSIAN, ("sqrt",), ("price",), ("adaptive", "constant")),
    (_GAUSSIAN, ("cholesky",), (*_PATH, "price"), ("snngm",)),
    (("full",), ("cholesky_precision",), (*_PATH, "price"), ("snngm",)),
    (_GAUSSIAN, ("euclidean",), (*_PATH, "price"), ("adam", "sgd")),
    (_GAUSSIAN, ("cholesky",), (*_PATH, "price"), ("adam", "constant")),
    (("full",), ("cholesky_precision",), (*_PATH, "price"), ("adam", "constant")),
    (("diagonal",), ("natural",), ("gauss_newton",), ("constant", "decay", "proximal")),
    (_GAUSSIAN, ("natural",), _PATH, ("decay", "proximal", "constant")),
    (_GAUSSIAN, ("natural_pd", "sqrt"), _PATH, ("constant",)),
    (("sparse",), ("natural",), ("price",), ("adaptive", "proximal", "constant")),
    (("sparse",), ("cholesky_precision",), ("price",), ("adaptive",)),
    (("sparse",), ("cholesky_precision",), (*_PATH, "price"), ("snngm", "adam", "constant")),
    (("sparse",), ("euclidean",), (*_PATH, "price"), ("adam", "sgd")),
    (("sparse",), ("natural",), _PATH, ("proximal", "constant")),
    (("mixture",), ("natural", "natural_pd", "cholesky", "sqrt"), ("price",), ("trust_region",)),
    (("student_t",), ("natural", "natural_pd", "cholesky", "sqrt"), ("price",), ("scale_mixture",)),
    (("student_t",), ("natural",), ("stein",), ("scale_mixture",)),
)


def _rows() -> tuple[tuple[str, str, str, str], ...]:
    rows = [
        (family, update, estimator, step)
        for families, updates, estimators, steps in _PRODUCTS
        for family in families
        for update in updates
        for estimator in estimators
        for step in steps
    ]
    return tuple(dict.fromkeys(rows))


#: What other packages and papers call our entries, by axis; in lower case, without hyphens.
_ALSO_CALLED = {
    "family": {
        "diagonal": "meanfield mf mfvi advi factorised factorized diag independent",
        "full": "fullrank fullrankadvi mvn mvnormal multivariatenormal gaussian normal dense laplace unstructured",
        "block": "blockdiagonal blocks",
        "sparse": "sparseprecision structured hierarchical",
        "mixture": "gmm gaussianmixture",
        "student_t": "t student multivariatet",
    },
    "estimator": {"price": "hessian bonnet", "pathwise": "reparam reparameterization reparametrization"},
    "step": {"adaptive": "auto linesearch"},
}

#: Combinations that are allowed: family, update, estimator, step rule.
ALLOWED: tuple[tuple[str, str, str, str], ...] = _rows()

#: Reasons that hold for a family and for its step rule, whichever is named.
_FIXED = "components are solved on fixed draws, for which curvatures must be those of log p: take estimator='price'"
_COMPONENTS = "components take natural-gradient steps: take update='natural'"
_T_ESTIMATOR = (
    "the t is fitted with Hessians, or with gradients paired with base draws: take estimator='price' or 'stein'"
)
_T_UPDATE = "the t takes natural-gradient steps and holds a factor of its scale matrix: take update='natural'"
_T_GRADIENTS = "from gradients alone the t takes steps in natural parameters: take update='natural'"

#: Why others are not: the first whose entries are all in a combination.
_REASONS: tuple[tuple[dict[str, tuple[str, ...]], str], ...] = (
    (
        {"family": ("mixture",), "estimator": ("stein", "pathwise", "gauss_newton")},
        _FIXED,
    ),
    (
        {"family": ("mixture",), "update": ("cholesky_precision", "euclidean")},
        _COMPONENTS,
    ),
    (
        {"family": ("mixture",), "step": tuple(name for name in STEPS if name != "trust_region")},
        "a mixture is fitted within trust regions, which also find its components: take step='trust_region'",
    ),
    (
        {"step": ("trust_region",), "family": tuple(name for name in FAMILIES if name != "mixture")},
        "trust_region finds, fits and drops components: take family='mixture'",
    ),
    (
        {"step": ("trust_region",), "estimator": ("stein", "pathwise", "gauss_newton")},
        _FIXED,
    ),
    (
        {"step": ("trust_region",), "update": ("cholesky_precision", "euclidean")},
        _COMPONENTS,
    ),
    (
        {"family": ("student_t",), "estimator": ("pathwise", "gauss_newton")},
        _T_ESTIMATOR,
    ),
    (
        {"family": ("student_t",), "update": ("cholesky_precision", "euclidean")},
        _T_UPDATE,
    ),
    (
        {"family": ("student_t",), "estimator": ("stein",), "update": ("natural_pd", "cholesky", "sqrt")},
        _T_GRADIENTS,
    ),
    (
        {"family": ("student_t",), "step": tuple(name for name in STEPS if name != "scale_mixture")},
        "a rule of its own fits the degrees of freedom, too: take step='scale_mixture'",
    ),
    (
        {"step": ("scale_mixture",), "family": tuple(name for name in FAMILIES if name != "student_t")},
        "scale_mixture fits degrees of freedom: take family='student_t'",
    ),
    (
        {"step": ("scale_mixture",), "estimator": ("pathwise", "gauss_newton")},
        _T_ESTIMATOR,
    ),
    (
        {"step": ("scale_mixture",), "update": ("cholesky_precision", "euclidean")},
        _T_UPDATE,
    ),
    (
        {"step": ("scale_mixture",), "estimator": ("stein",), "update": ("natural_pd", "cholesky", "sqrt")},
        _T_GRADIENTS,
    ),
    (
        {"estimator": ("gauss_newton",), "family": ("full", "block", "sparse")},
        "gauss_newton keeps the squares of gradients only, which is a diagonal: take family='diagonal'",
    ),
    (
        {"update": ("cholesky_precision",), "family": ("diagonal", "block")},
        "a factor of the precision of independent blocks is no other family: take update='cholesky'",
    ),
    (
        {"update": ("cholesky", "sqrt"), "family": ("sparse",)},
        "the covariance of a sparse precision is dense, and so is its factor: take update='cholesky_precision'",
    ),
    (
        {"update": ("natural_pd",), "family": ("sparse",)},
        "its correction squares a matrix, which fills it in: take update='natural', whose steps are shortened instead",
    ),
    (
        {"step": ("decay",), "family": ("sparse",)},
        "decay averages moments, and a mean of covariances has no sparse inverse: take step='constant' or 'proximal'",
    ),
    (
        {
            "estimator": ("gauss_newton",),
            "update": ("natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean"),
        },
        "gauss_newton replaces the curvature in the natural-parameter update: take update='natural'",
    ),
    (
        {"estimator": ("gauss_newton",), "step": ("adaptive", "snngm", "adam", "sgd")},
        "gauss_newton goes with rules for natural parameters: take step='constant', 'decay' or 'proximal'",
    ),
    (
        {"step": ("adaptive",), "estimator": ("stein", "pathwise")},
        "adaptive maximises the ELBO on fixed draws, for which curvatures must be those of log p; gradients alone "
        "overfit draws that are fewer than the dimensions: take estimator='price', or another step rule",
    ),
    (
        {"step": ("adaptive",), "update": ("euclidean",)},
        "adaptive starts from steps of size 1, which are right for natural gradients only: take step='adam'",
    ),
    (
        {
            "step": ("decay", "proximal"),
            "update": ("natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean"),
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
        if name is not None and (not isinstance(name, str) or name not in AXES[axis]):
            raise ValueError(f"Unknown {axis} {name!r}: {suggestion(name, AXES[axis], _ALSO_CALLED.get(axis))}")
    for row in ALLOWED:
        choice = Choice(*row)
        if all(name is None or getattr(choice, axis) == name for axis, name in chosen.items()):
            return choice
    given = ", ".join(f"{axis}={name!r}" for axis, name in chosen.items() if name is not None)
    raise ValueError(f"{given} don't go together: {_reason(chosen)}.")


def stochastic_step(**chosen: str | None) -> str | None:
    """Return the step rule that suits what was chosen and evaluates each step on data of its own."""
    for row in ALLOWED:
        choice = Choice(*row)
        agrees = all(name is None or getattr(choice, axis) == name for axis, name in chosen.items())
        if agrees and choice.step not in ON_FIXED_DRAWS:
            return choice.step
    return None


def _reason(chosen: Mapping[str, str | None]) -> str:
    """Return why a combination is not allowed."""
    for entries, sentence in _REASONS:
        if all(chosen.get(axis) in names for axis, names in entries.items()):
            return sentence
    return "no row of pymc_ngvi.fitting.registry.ALLOWED has them all"
