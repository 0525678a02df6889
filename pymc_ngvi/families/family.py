"""What a family is: it makes approximations of location and scale, and says of itself what the package asks of it."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from pymc_ngvi.core.types import Array, VariationalState


class Product(NamedTuple):
    """Updates, estimators and step rules of which all combinations are allowed."""

    updates: tuple[str, ...]
    estimators: tuple[str, ...]
    steps: tuple[str, ...]


class Refusal(NamedTuple):
    """Why something does not go with a family."""

    axis: str
    #: Of entries on this axis.
    names: tuple[str, ...]
    #: The reason, and what to take instead.
    sentence: str
    #: Where it holds for some updates only: these.
    update: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is known of a family before there is a model.

    Parameters
    ----------
    name : str
        As users give it.
    also_called : str
        What other packages and papers call it: lower case, without hyphens, separated by blanks.
    states : tuple of type
        Classes of its approximations.
    goes_with : tuple of Product
        In this order: the first that agrees with what the user chose fills in the rest.
    refuses : tuple of Refusal
        Reasons for what it does not go with.
    own_rule : str
        Step rule that only this family has, and that it implies; empty where users choose one.
    options : tuple of str
        Options of a fit that only this family takes.
    factors : tuple of {"covariance", "precision"}
        What a Cholesky factor may be of.
    is_gaussian : bool
        Whether q is one Gaussian: a reparametrisation, and an exact posterior, begin from one.
    has_all_correlations : bool
        Whether every pair of coordinates can be correlated.
    has_components : bool
        Whether q can have several modes.
    from_structure : bool
        Whether its form is that of the Hessian of the model.
    """

    name: str
    also_called: str = ""
    states: tuple[type, ...] = ()
    goes_with: tuple[Product, ...] = ()
    refuses: tuple[Refusal, ...] = ()
    own_rule: str = ""
    options: tuple[str, ...] = ()
    factors: tuple[str, ...] = ("covariance",)
    is_gaussian: bool = True
    has_all_correlations: bool = True
    has_components: bool = False
    from_structure: bool = False


class Maker[Q: VariationalState](Protocol):
    """Makes approximations: a family for one model, or a class of states that needs no more than location and scale."""

    def from_scale(self, location: Array, scale: Array) -> Q:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""


class Family[Q: VariationalState](Maker[Q], Protocol):
    """The approximations of one structure. `FAMILIES` has each by its name."""

    traits: ClassVar[Traits]

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family for a model, as a `Form`, and a fit's options: by default the same for all.

        Raises
        ------
        ValueError
            Where the model has not the structure that it takes.
        """
        return cls()


_PATH = ("pathwise", "stein")
#: Where log p is a sum over rows.
BY_ROWS = Product(("natural",), ("quadrature",), ("linesearch",))
#: What a Gaussian goes with that holds a factor of the covariance or of the precision, as the update asks.
ALL_GAUSSIAN = (
    Product(("natural",), ("price",), ("adaptive", "decay", "proximal", "constant")),
    Product(("natural_pd",), ("price",), ("adaptive", "constant")),
    Product(("cholesky",), ("price",), ("adaptive",)),
    Product(("cholesky_precision",), ("price",), ("adaptive",)),
    Product(("sqrt",), ("price",), ("adaptive", "constant")),
    Product(("cholesky",), (*_PATH, "price"), ("snngm",)),
    Product(("cholesky_precision",), (*_PATH, "price"), ("snngm",)),
    Product(("euclidean",), (*_PATH, "price"), ("adam", "sgd")),
    Product(("cholesky",), (*_PATH, "price"), ("adam", "constant")),
    Product(("cholesky_precision",), (*_PATH, "price"), ("adam", "constant")),
    Product(("natural",), _PATH, ("decay", "proximal", "constant")),
    Product(("natural",), ("score",), ("proximal", "decay", "constant")),
    Product(("natural_pd", "sqrt"), _PATH, ("constant",)),
    BY_ROWS,
)
#: And one that holds a factor of the covariance only, and one that holds a factor of the precision only.
OF_COVARIANCE = tuple(product for product in ALL_GAUSSIAN if product.updates != ("cholesky_precision",))
OF_PRECISION = (
    Product(("natural",), ("price",), ("adaptive", "proximal", "constant")),
    Product(("cholesky_precision",), ("price",), ("adaptive",)),
    Product(("cholesky_precision",), (*_PATH, "price"), ("snngm", "adam", "constant")),
    Product(("euclidean",), (*_PATH, "price"), ("adam", "sgd")),
    Product(("natural",), _PATH, ("proximal", "constant")),
    Product(("natural",), ("score",), ("proximal", "constant")),
    BY_ROWS,
)
#: Products of the gradients of rows.
GAUSS_NEWTON = Product(("natural",), ("gauss_newton",), ("decay", "constant", "proximal"))
NO_QUADRATURE = Refusal(
    "estimator",
    ("quadrature",),
    "expectations of rows are taken under a Gaussian whose covariances are at hand: take family='full', 'diagonal', "
    "'block' or 'sparse'",
)
NO_GAUSS_NEWTON = Refusal(
    "estimator",
    ("gauss_newton",),
    "gauss_newton adds up products of the gradients of rows, which no sparsity of the Hessian holds: take "
    "family='diagonal', 'block' or 'full'",
)
NO_IVON = Refusal(
    "step",
    ("ivon",),
    "ivon averages the curvatures of single draws, which tell a diagonal only: take family='diagonal'",
)
NO_OTHER_FACTOR = Refusal(
    "update",
    ("cholesky_precision",),
    "a factor of the precision of independent blocks is no other family: take update='cholesky'",
)
