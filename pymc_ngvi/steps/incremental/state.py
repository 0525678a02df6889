"""What an incremental fit hands from one batch to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.stream import Place, StreamReport
from pymc_ngvi.core.target import MatrixHessian
from pymc_ngvi.core.types import Array, Expectation, GaussianState

# --- sites: what a batch says of theta, as a quadratic function ---
#
# The expected log likelihood of a batch under a Gaussian near :math:`q = N(m, V)` is about that of
# :math:`c + \lambda^T \theta - \tfrac{1}{2} \theta^T \Lambda \theta`, where :math:`\Lambda = -E_q[H]` and
# :math:`\lambda = E_q[g] + \Lambda m`: the two have the same value, and the same derivatives by m and V.


#: Batches from which on an order can be seen; errors of the serial correlation, and its least size, that count as one;
#: sampling variances that batches may differ by.
_FEWEST, _ERRORS, _LEAST, _MOST_SPREAD = 4, 3.5, 0.1, 4.0


class SeenByQuadratics(NamedTuple):
    """What quadratic functions see of a Gaussian."""

    #: shape (n_dim,).
    mean: Array
    #: Packed, entries off the diagonal twice.
    cov: Array

    @classmethod
    def of(cls, q: GaussianState) -> Self:
        """Return what they see."""
        if is_diagonal(q):
            return cls(q.location, q.sd() ** 2)
        cov = pack(q.cov()) * 2.0
        i = np.arange(q.n_dim)
        cov[(i * (i + 3) // 2)] *= 0.5
        return cls(q.location, cov)


@stored("incremental.quadratic", content=("n_rows", "constant", "linear", "precision"))
@dataclass(frozen=True, eq=False)
class Quadratic:
    """A quadratic function of theta, and of how many rows."""

    n_rows: int
    constant: float
    #: shape (n_dim,).
    linear: Array
    #: The lower triangle by rows, (n_dim * (n_dim + 1) / 2,); or the diagonal, (n_dim,), for a q that takes no more.
    precision: Array

    @classmethod
    def of(cls, n_rows: int, value: float, grad: Array, hessian: Array, seen: SeenByQuadratics) -> Self:
        """Return the function with an expectation and derivatives, the Hessian packed, under a Gaussian."""
        flat = cls(n_rows, 0.0, grad, -hessian)
        linear = grad + flat.times(seen.mean)
        without = cls(n_rows, 0.0, linear, -hessian)
        return cls(n_rows, value - without.value(seen), linear, -hessian)

    @classmethod
    def none(cls, q: GaussianState) -> Self:
        """Return 0."""
        n_entries = q.n_dim if is_diagonal(q) else q.n_dim * (q.n_dim + 1) // 2
        return cls(0, 0.0, np.zeros(q.n_dim), np.zeros(n_entries))

    def __add__(self, other: "Quadratic") -> "Quadratic":
        """Return the sum."""
        linear, precision = self.linear + other.linear, self.precision + other.precision
        return Quadratic(self.n_rows + other.n_rows, self.constant + other.constant, linear, precision)

    def __sub__(self, other: "Quadratic") -> "Quadratic":
        """Return the difference."""
        linear, precision = self.linear - other.linear, self.precision - other.precision
        return Quadratic(self.n_rows - other.n_rows, self.constant - other.constant, linear, precision)

    def times_number(self, number: float) -> "Quadratic":
        """Return a multiple, of as many rows."""
        return Quadratic(self.n_rows, number * self.constant, number * self.linear, number * self.precision)

    def times(self, theta: Array) -> Array:
        """Return the precision times theta."""
        n_dim = len(theta)
        if len(self.precision) == n_dim and n_dim > 1:
            return self.precision * theta
        return unpack(self.precision, n_dim) @ theta

    def value(self, seen: SeenByQuadratics) -> float:
        """Return the expectation under a Gaussian."""
        mean = seen.mean
        square = float(mean @ self.times(mean)) + float(self.precision @ seen.cov)
        return self.constant + float(self.linear @ mean) - 0.5 * square

    def grad(self, seen: SeenByQuadratics) -> Array:
        """Return the expectation of the gradient."""
        return self.linear - self.times(seen.mean)


def is_diagonal(q: GaussianState) -> bool:
    """Tell whether a Gaussian has no correlations: the diagonal of a Hessian is all that it takes."""
    return q.n_params <= 2 * q.n_dim


def packed(found: Expectation, q: GaussianState) -> Array:
    """Return the expected Hessian as quadratic functions keep it."""
    return found.hessian.diagonal() if is_diagonal(q) else pack(found.hessian.products(np.eye(q.n_dim)))


def as_hessian(values: Array, n_dim: int) -> MatrixHessian:
    """Return a Hessian of what quadratic functions keep."""
    return MatrixHessian(np.diag(values) if len(values) == n_dim else unpack(values, n_dim))


def pack(matrix: Array) -> Array:
    """Return the lower triangle, by rows."""
    return matrix[np.tril_indices(len(matrix))]


def unpack(values: Array, n_dim: int) -> Array:
    """Return the symmetric matrix of a lower triangle."""
    result = np.zeros((n_dim, n_dim))
    result[np.tril_indices(n_dim)] = values
    return result + np.tril(result, -1).T


# --- what errors in expected derivatives mean ---


def gap_by_newton(q: GaussianState, grad: Array, hessian: Array) -> float:
    """Return the nats to be gained where expected derivatives, the Hessian packed, are off by so much."""
    whitened = q.whiten(grad[None])[0]
    error = q.flat(q.curvature(as_hessian(hessian, q.n_dim)))
    return 0.5 * float(whitened @ whitened) + 0.25 * q.inner(error, error)


def moves(q: GaussianState, grads: Array) -> Array:
    """Return how far errors in gradients, (n, n_dim), move means, in standard deviations."""
    return q.covariance_times(grads) / q.sd()


def sign_of_order(q: GaussianState, sites: Sequence[Quadratic]) -> str:
    """Return what speaks for an order of the data, in a clause; empty where nothing does."""
    if len(sites) < _FEWEST:
        return ""
    seen, sizes = SeenByQuadratics.of(q), np.array([site.n_rows for site in sites], dtype=float)
    slopes = q.whiten(np.array([site.grad(seen) for site in sites]))
    parts = sizes / sizes.sum()
    # Where rows come in any order, each is an independent draw with the covariance of the information of a batch.
    z = (slopes - parts[:, None] * slopes.sum(axis=0)) / np.sqrt(parts)[:, None]
    n, variance = len(z), (z**2).mean(axis=0)
    if not variance.sum() > 0.0:
        return ""
    correlation = 1.0 - 0.5 * n / (n - 1) * float((np.diff(z, axis=0) ** 2).sum() / (z**2).sum())
    n_effective = n * variance.sum() ** 2 / (variance**2).sum()
    if correlation > max(_LEAST, _ERRORS / np.sqrt(n_effective)):
        return f"neighbouring batches are alike (serial correlation {correlation:.2f})"
    spread = float(variance.mean()) * n / (n - 1)
    if spread > _MOST_SPREAD:
        return (
            f"batches differ {np.sqrt(spread):.1f} times as much as the model lets random samples of rows do (they are "
            "in some order, or the likelihood is too narrow)"
        )
    return ""


@stored("incremental.site", content=("content", "print", "part"))
@dataclass(frozen=True, eq=False)
class Site:
    """What a batch has said at its last visit."""

    content: Quadratic
    #: Of the batch.
    print: str
    #: The same of some of its rows, where the batch will not be seen again.
    part: Quadratic | None = None


@stored("incremental.change")
@dataclass(frozen=True, eq=False)
class Change:
    """How far what batches say has moved since their last visits, over a pass."""

    #: Expected gradients less those of the sites kept, each under the q of the visit; the sum over batches; shape
    #: (n_dim,).
    grad: Array
    #: The same of Hessians, packed.
    hessian: Array
    #: The same of expectations.
    value: float = 0.0
    #: Nats by which quadrature may be off.
    error: float = 0.0


@stored("incremental.state", content=(
    "q", "elbo", "place", "sites", "total", "change", "gaps", "elbo_error", "step_size", "is_held", "is_blind",
    "moved", "ordered",
))  # fmt: skip
@dataclass(frozen=True, eq=False)
class IncrementalState:
    """What one iteration, the visit of a batch, hands to the next."""

    q: GaussianState
    #: As the sites have it.
    elbo: float
    #: The next batch.
    place: Place
    #: By batch; None where there was no visit yet.
    sites: tuple[Site | None, ...]
    #: Their sum.
    total: Quadratic
    #: In this pass.
    change: Change
    #: What each pass that is over has shown of the q before it: nats that were to be gained then.
    gaps: tuple[float, ...] = ()
    #: Nats by which the ELBO may be off.
    elbo_error: float = np.inf
    #: The last one.
    step_size: float = 1.0
    #: Whether q moves at the ends of passes alone: batches are not the same in each pass.
    is_held: bool = False
    #: Whether the last batch has no finite expectation.
    is_blind: bool = False
    #: The farthest that a mean has moved in the last pass, in posterior standard deviations.
    moved: float = np.inf
    #: What speaks for an order of the data, in a clause; empty where nothing does.
    ordered: str = ""

    n_draws = 0
    n_dropped = 0

    @property
    def gap(self) -> float:
        """Nats that were still to be gained before the last pass, or are after the only one; infinite before."""
        return self.gaps[-1] if self.gaps else np.inf

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end: none that is looked for."""
        return np.empty(0, dtype=np.intp)

    @property
    def report(self) -> StreamReport:
        """What is known of the data."""
        number, position, _ = self.place
        n_batches = sum(site is not None for site in self.sites)
        was_read_once = any(site is not None and site.part is not None for site in self.sites)
        return StreamReport(
            number, position, n_batches, self.total.n_rows, self.gap, self.moved, was_read_once, self.is_held,
            self.ordered,
        )  # fmt: skip
