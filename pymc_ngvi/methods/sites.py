r"""Natural steps batch by batch.

q is the prior times a site for each batch, which is made anew at each visit [1]_ [2]_. Batches that were not seen yet
are taken to say what those seen say on average. The ELBO of the model in which the other batches are their sites, and
this one is itself, is exact; a step that is large has to raise it. Fits end after a pass that has shown that the q
before it was within the tolerance.

References
----------
.. [1] M. E. Khan and W. Lin (2017). Conjugate-computation variational inference. AISTATS.
.. [2] N. Le Roux, M. Schmidt and F. Bach (2012). A stochastic gradient method with an exponential convergence rate for
   finite training sets. NeurIPS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, cast

import numpy as np

from pymc_ngvi.core.linalg import GIB, fits_in_memory
from pymc_ngvi.core.status import Elbo, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, Evaluation, Expectation, MatrixHessian
from pymc_ngvi.density.streams import Batch, Place, StreamDensity, StreamReport
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import ExactEvaluation, Moments
from pymc_ngvi.methods.schedule import NO_DRAWS, ExactRule, search

# --- sites: what a batch says of theta, as a quadratic function ---
#
# The expected log likelihood of a batch under a Gaussian near :math:`q = N(m, V)` is about that of
# :math:`c + \lambda^T \theta - \tfrac{1}{2} \theta^T \Lambda \theta`, where :math:`\Lambda = -E_q[H]` and
# :math:`\lambda = E_q[g] + \Lambda m`: the two have the same value, and the same derivatives by m and V.


#: Batches from which on an order can be seen; errors of the serial correlation, and its least size, that count as one;
#: sampling variances that batches may differ by.
_FEWEST, _ERRORS, _LEAST, _MOST_SPREAD = 4, 3.5, 0.1, 4.0


#: What quadratic functions see of a Gaussian: the mean; and the covariance, or the variances.
type Seen = tuple[Array, Array]


def seen_of(q: AnyGaussian) -> Seen:
    """Return what quadratic functions see of a Gaussian."""
    return q.location, q.sd() ** 2 if is_diagonal(q) else q.cov()


@stored("incremental.quadratic", content=("n_rows", "constant", "linear", "precision"))
@dataclass(frozen=True, eq=False)
class Quadratic:
    """A quadratic function of theta, and of how many rows."""

    n_rows: int
    constant: float
    #: shape (n_dim,).
    linear: Array
    #: shape (n_dim, n_dim); or the diagonal, (n_dim,), for a q that takes no more.
    precision: Array

    @classmethod
    def of(cls, n_rows: int, found: Expectation, q: AnyGaussian, seen: Seen) -> Self:
        """Return the function with an expectation and derivatives under a Gaussian."""
        slopes = cls(n_rows, 0.0, found.grad, -hessian_of(found, q))
        without = replace(slopes, linear=found.grad + slopes.times(seen[0]))
        return replace(without, constant=found.value - without.value(seen))

    @classmethod
    def none(cls, q: AnyGaussian) -> Self:
        """Return 0."""
        return cls(0, 0.0, np.zeros(q.n_dim), np.zeros((q.n_dim,) * (1 if is_diagonal(q) else 2)))

    def __add__(self, other: "Quadratic") -> "Quadratic":
        """Return the sum."""
        linear, precision = self.linear + other.linear, self.precision + other.precision
        return Quadratic(self.n_rows + other.n_rows, self.constant + other.constant, linear, precision)

    def __sub__(self, other: "Quadratic") -> "Quadratic":
        """Return the difference."""
        return self + Quadratic(-other.n_rows, -other.constant, -other.linear, -other.precision)

    def times(self, theta: Array) -> Array:
        """Return the precision times theta."""
        return self.precision @ theta if self.precision.ndim > 1 else self.precision * theta

    def value(self, seen: Seen) -> float:
        """Return the expectation under a Gaussian."""
        mean, cov = seen
        square = float(mean @ self.times(mean)) + float(np.vdot(self.precision, cov))
        return self.constant + float(self.linear @ mean) - 0.5 * square

    def grad(self, seen: Seen) -> Array:
        """Return the expectation of the gradient."""
        return self.linear - self.times(seen[0])


def is_diagonal(q: AnyGaussian) -> bool:
    """Tell whether a Gaussian has no correlations: the diagonal of a Hessian is all that it takes."""
    return q.n_params <= 2 * q.n_dim


def hessian_of(found: Expectation, q: AnyGaussian) -> Array:
    """Return the expected Hessian as quadratic functions keep it."""
    return found.hessian.diagonal() if is_diagonal(q) else found.hessian.products(np.eye(q.n_dim))


def as_hessian(values: Array) -> MatrixHessian:
    """Return a Hessian of what quadratic functions keep."""
    return MatrixHessian(values if values.ndim > 1 else np.diag(values))


# --- what errors in expected derivatives mean ---


def gap_by_newton(q: AnyGaussian, grad: Array, hessian: Array) -> float:
    """Return the nats to be gained where expected derivatives are off by so much."""
    whitened = q.whiten(grad[None])[0]
    error = q.curvature(as_hessian(hessian)).ravel()
    return 0.5 * float(whitened @ whitened) + 0.25 * q.inner(error, error)


def moves(q: AnyGaussian, grads: Array) -> Array:
    """Return how far errors in gradients, (n, n_dim), move means, in standard deviations."""
    return q.covariance_times(grads) / q.sd()


def sign_of_order(q: AnyGaussian, sites: Sequence[Quadratic]) -> str:
    """Return what speaks for an order of the data, in a clause; empty where nothing does."""
    if len(sites) < _FEWEST:
        return ""
    seen, sizes = seen_of(q), np.array([site.n_rows for site in sites], dtype=float)
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


@stored("incremental.state", content=(
    "q", "elbo", "place", "sites", "total", "change", "error", "gaps", "elbo_error", "step_size", "is_held", "is_blind",
    "moved", "ordered",
))  # fmt: skip
@dataclass(frozen=True, eq=False)
class IncrementalState:
    """What one iteration, the visit of a batch, hands to the next."""

    q: AnyGaussian
    #: As the sites have it.
    elbo: float
    #: The next batch.
    place: Place
    #: By batch; None where there was no visit yet.
    sites: tuple[Site | None, ...]
    #: Their sum.
    total: Quadratic
    #: What batches have said in this pass, less what their sites said; and nats by which quadrature may be off.
    change: Quadratic
    error: float = 0.0
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
    def report(self) -> StreamReport:
        """What is known of the data."""
        number, position, _ = self.place
        n_batches = sum(site is not None for site in self.sites)
        was_read_once = any(site is not None and site.part is not None for site in self.sites)
        return StreamReport(
            number, position, n_batches, self.total.n_rows, self.gap, self.moved, was_read_once, self.is_held,
            self.ordered,
        )  # fmt: skip


# --- after the only pass through data that can be read once: what a few rows of each batch say now ---
# A site is what a batch said when it was read, and q has moved on. Some rows of each batch are kept, all together as
# many as one batch has, and are asked once more: what they say now, less what they said then, stands for all rows of
# their batch. That corrects q, and how it varies from batch to batch bounds the error that is left.

#: Times that rows are asked; nats that a correction gains, below which it is the last.
_MOST_ROUNDS, _NEAR_ONCE = 6, 1e-3
#: Takes a natural step on the prior and the sum of sites; returns the nats that it promised, and where it leads.
type Step = Callable[[AnyGaussian, Quadratic], tuple[float, AnyGaussian]]


def corrected(target: StreamDensity, step: Step, state: IncrementalState) -> IncrementalState:
    """Return the state after the only pass, corrected by the rows that were kept, with the error that is left."""
    q, total, error, changes = state.q, state.total, 0.0, list[Quadratic]()
    for _ in range(_MOST_ROUNDS):
        # What each batch is to be expected to say now, less what it said then, and the error of quadrature.
        seen, changes, error = seen_of(q), [], 0.0
        for which, site in enumerate(cast(tuple[Site, ...], state.sites)):
            found, part = target.of_kept(which, q), cast(Quadratic, site.part)
            now = Quadratic.of(part.n_rows, found, q, seen) - part
            weight = site.content.n_rows / part.n_rows
            changes.append(Quadratic(0, weight * now.constant, weight * now.linear, weight * now.precision))
            error += weight * found.error
        total = sum(changes, state.total)
        gap, new = step(q, total)
        q = new
        if gap < _NEAR_ONCE:
            break
    # Of the changes' scatter no more is known than their squares, which have the changes themselves in them.
    seen = seen_of(q)
    slopes = np.array([change.grad(seen) for change in changes])
    gap = sum(gap_by_newton(q, slope, -change.precision) for slope, change in zip(slopes, changes, strict=True))
    values = np.array([change.value(seen) for change in changes])
    return replace(
        state,
        q=q,
        total=total,
        gaps=(gap,),
        elbo_error=float(np.sqrt((values**2).sum())) + error,
        moved=float(np.sqrt((moves(q, slopes) ** 2).sum(axis=0)).max()),
    )


# --- natural steps batch by batch ---

#: Nats that a step may promise and be taken unseen; steps on one batch, the first one of all and others, at most.
_NEAR, _MOST_FIRST, _MOST_STEPS = 0.1, 30, 2
#: Passes without progress after which there is none to be expected, and what counts as progress.
_MOST_IDLE, _PROGRESS = 4, 0.5


class _Tried(NamedTuple):
    """A state with what is known of it."""

    q: AnyGaussian
    seen: Seen
    #: Of the log likelihood of the batch.
    batch: Expectation
    #: Where other batches are their sites.
    elbo: float
    #: Of that.
    moments: Moments


class Incremental(ExactRule[StreamDensity, IncrementalState]):
    """Natural steps on a sum of sites of batches; see `StepRule` for the parameters."""

    _first: Batch | None = None

    def first_evaluation(self, q: AnyGaussian) -> Evaluation:
        """Evaluate a starting state on the first batch alone, as if all others were like it."""
        tried = self._tried(q, self._read(Place()).n_rows, Quadratic.none(q))
        return ExactEvaluation.of(tried.batch, tried.elbo)

    def init(self, q: AnyGaussian) -> IncrementalState:
        """Return the state before the first batch."""
        none = Quadratic.none(q)
        n_rows = self._read(Place()).n_rows
        n_batches = -(-self._target.total_size // n_rows)
        needed = n_batches * (none.linear.nbytes + none.precision.nbytes)
        if not fits_in_memory(needed):
            raise MemoryError(
                f"What {n_batches:,} batches of {n_rows:,} rows say of {len(none.linear):,} coordinates takes about "
                f"{needed / GIB:,.1f} GiB, more than this machine has: give batches of more rows, or take "
                "family='diagonal', which ignores correlations."
            )
        return IncrementalState(q, -np.inf, Place(), (), none, none)

    # --- a visit ---

    def step(self, state: IncrementalState) -> IncrementalState:
        """Go to the next batch."""
        batch = self._read(state.place)
        self._first = None
        old = state.sites[batch.which] if batch.which < len(state.sites) else None
        is_held = state.is_held or (old is not None and old.print != batch.print)
        others = state.total if old is None else state.total - old.content
        before = self._tried(state.q, batch.n_rows, others)
        if not np.isfinite(before.elbo):
            return replace(state, is_blind=True)
        now, is_first = Quadratic.of(batch.n_rows, before.batch, before.q, before.seen), not state.total.n_rows
        after = (
            before
            if is_held
            else self._improved(before, batch.n_rows, others, _MOST_FIRST if is_first else _MOST_STEPS)
        )
        content = Quadratic.of(batch.n_rows, after.batch, after.q, after.seen)
        part = None
        if self._target.is_read_once:  # some rows are kept
            n_kept, found = self._target.keep(batch.which, after.q)
            part = Quadratic.of(n_kept, found, after.q, after.seen)
        site = Site(content, batch.print, part)
        known = [*state.sites, *[None] * (batch.which + 1 - len(state.sites))]
        known[batch.which] = site
        state = replace(
            state,
            sites=tuple(known),
            total=others + content,
            change=state.change if old is None else state.change + (now - old.content),
            error=state.error + before.batch.error,
            is_held=is_held,
            is_blind=False,
            place=Place(state.place.number, state.place.position + 1, state.place.n_before + batch.n_rows),
        )
        # Of a large step that was not tried, nothing is known.
        takes_step = batch.is_last if is_held else after.moments.gap < _NEAR
        q = self._update(after.q, after.moments, 1.0, True) if takes_step else None
        state = replace(state, q=after.q if q is None else q)
        state = replace(state, elbo=self._elbo_of(state))
        return self._after_a_pass(state) if batch.is_last else state

    def _read(self, place: Place) -> Batch:
        """Return the batch at a place: the first one of all is kept, as starts are compared on it."""
        if place != Place():
            return self._target.read(self._seed, place)
        self._first = self._first or self._target.read(self._seed, place)
        return self._first

    def _tried(self, q: AnyGaussian, n_rows: int, others: Quadratic, before: _Tried | None = None) -> _Tried:
        """Evaluate a state on the prior, a batch of so many rows, and the sites of the others, which stand for all."""
        with np.errstate(all="ignore"):
            seen, prior = seen_of(q), self._target.of_prior(q)
            batch = self._target.of_batch(q, None if before is None else before.batch.rules)
            weight = self._target.total_size / (others.n_rows + n_rows)
            value = prior.value + weight * (batch.value + others.value(seen))
            grad = prior.grad + weight * (batch.grad + others.grad(seen))
            hessian = hessian_of(prior, q) + weight * (hessian_of(batch, q) - others.precision)
            whole = Expectation(value, batch.error, grad, as_hessian(hessian), batch.rules)
            finite = np.isfinite(value) and np.isfinite(grad).all() and np.isfinite(hessian).all()
            elbo = value + q.entropy() if finite else -np.inf
            moments = self._estimator.moments(self._target, q, NO_DRAWS, ExactEvaluation.of(whole, elbo))
        return _Tried(q, seen, batch, elbo, moments)

    def _improved(self, tried: _Tried, n_rows: int, others: Quadratic, most: int) -> _Tried:
        """Take steps that raise the ELBO, as long as they promise more than little."""
        if not most or tried.moments.gap < _NEAR:
            return tried
        found = search(
            lambda rho: self._update(tried.q, tried.moments, rho, True),
            lambda q: self._tried(q, n_rows, others, tried),
            lambda new: new.elbo > tried.elbo,
            elbo=tried.elbo,
            slope=2.0 * tried.moments.gap,
            first=1.0,
        )
        return tried if isinstance(found, Status) else self._improved(found.evaluation, n_rows, others, most - 1)

    def _stepped(self, q: AnyGaussian, total: Quadratic) -> tuple[float, AnyGaussian]:
        """Take a natural step where all batches are their sites; return the nats that it promised, too."""
        seen, prior = seen_of(q), self._target.of_prior(q)
        hessian = hessian_of(prior, q) - total.precision
        whole = prior._replace(grad=prior.grad + total.grad(seen), hessian=as_hessian(hessian))
        moments = self._estimator.moments(self._target, q, NO_DRAWS, ExactEvaluation.of(whole, 0.0))
        return moments.gap, self._update(q, moments, 1.0, True) or q

    def _elbo_of(self, state: IncrementalState) -> float:
        """Return the ELBO, as the sites have it."""
        weight = self._target.total_size / state.total.n_rows
        value = self._target.of_prior(state.q).value + weight * state.total.value(seen_of(state.q))
        return value + state.q.entropy()

    # --- the end of a pass ---

    def _after_a_pass(self, state: IncrementalState) -> IncrementalState:
        """Measure what the pass has shown."""
        number, change, quadrature = state.place.number, state.change, state.error
        sites = state.sites[: state.place.position]  # there may have been more in the pass before
        kept = [site.content for site in sites if site is not None]
        state = replace(
            state,
            sites=sites,
            total=sum(kept[1:], kept[0]),
            place=Place(number + 1),
            change=Quadratic.none(state.q),
            error=0.0,
            ordered=state.ordered or sign_of_order(state.q, kept),
        )
        if self._target.is_read_once:
            state = corrected(self._target, self._stepped, state)
            return replace(state, elbo=self._elbo_of(state))
        if not number:
            return state
        seen = seen_of(state.q)
        grad = change.grad(seen)
        gap = gap_by_newton(state.q, grad, -change.precision)
        error = abs(change.value(seen)) + quadrature
        moved = float(np.abs(moves(state.q, grad[None])).max())
        return replace(state, gaps=(*state.gaps, gap), elbo_error=error, moved=moved)

    def terminate(self, state: IncrementalState) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.is_blind:
            return Status.NO_FINITE_TRIAL
        if not (state.place.number > 0 and state.place.position == 0) or not state.gaps:
            return None
        if state.gaps[-1] < self._tolerance.least(state.q):
            return Status.CONVERGED
        if self._target.is_read_once:
            return Status.ONE_PASS
        least = min(state.gaps[:-_MOST_IDLE], default=np.inf)
        return Status.STALLED if min(state.gaps[-_MOST_IDLE:]) > _PROGRESS * least else None

    def assess(self, state: IncrementalState) -> Assessment:
        """Return what the last pass has told."""
        none = np.empty((0, state.q.n_dim))
        elbo = Elbo(state.elbo, state.elbo_error)
        return Assessment(none, np.empty(0), np.empty((0, 1), dtype=np.intp), state.gap, 0.0, elbo=elbo)

    def reopen(self, state: IncrementalState) -> IncrementalState:
        """Return a state in which a fit that ended may try again."""
        return replace(state, gaps=(), is_blind=False)
