"""What an incremental fit hands from one batch to the next."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.stream import Place, StreamReport
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.steps.incremental.sites import Quadratic


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
