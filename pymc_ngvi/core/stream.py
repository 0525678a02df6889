"""Data that are read batch by batch: where a fit is, and what it has to say of them."""

from dataclasses import dataclass
from typing import NamedTuple

from pymc_ngvi.core.elbo import format_gap
from pymc_ngvi.core.stored import stored


@stored("stream.place")
class Place(NamedTuple):
    """Which batch is the next one."""

    #: Of the pass through the data, from 0.
    number: int = 0
    #: In that pass, from 0.
    position: int = 0
    #: Rows of that pass that were read before.
    n_before: int = 0


class Batch(NamedTuple):
    """A batch that was read."""

    #: Tells batches of a pass apart; the same in each pass.
    which: int
    n_rows: int
    #: Whether it is the last one of its pass.
    is_last: bool
    #: Other data have another one.
    print: str


@stored("stream.report")
@dataclass(frozen=True)
class StreamReport:
    """What a fit has to say of data in batches."""

    #: Through all of the data.
    n_passes: int
    #: Batches of another pass that was not ended.
    n_more: int
    #: That were read.
    n_batches: int
    n_rows: int
    #: Nats that the last of several passes has gained: less is left. After the only pass, the nats that another one
    #: is to be expected to gain.
    gap: float
    #: How far means have moved by the last pass, or would by another one, in posterior standard deviations, at most.
    moved: float
    #: Whether there was one pass only, because the data could not be read again.
    was_read_once: bool
    #: Whether q moved at the ends of passes alone, because batches differ from pass to pass.
    is_held: bool
    #: What speaks for an order of the data, in a clause; empty where nothing does.
    ordered: str

    def __str__(self) -> str:
        """Return the same in sentences."""
        more = f" and {self.n_more} batches" if self.n_more else ""
        passes = f"{self.n_passes} pass{'es'[: 2 * (self.n_passes != 1)]}{more}"
        said = [f"{passes} through {self.n_batches} batches of {self.n_rows:,} rows."]
        sds, gap = f"up to {self.moved:.2g} posterior standard deviations", format_gap(self.gap, " nats")
        if self.gap < float("inf") and self.was_read_once:
            said.append(f"Another pass is expected to move means by {sds}, and to gain {gap}.")
        elif self.gap < float("inf"):
            said.append(f"The last one moved means by {sds} and gained {gap}; less is left.")
        if self.is_held:
            said.append("Batches are not the same in each pass: q moved at the ends of passes alone.")
        if self.ordered:
            said.append(f"The data seem to be ordered: {self.ordered}.")
        return " ".join(said)

    @property
    def warning(self) -> str:
        """What is to be warned of; empty where nothing is."""
        if not (self.ordered and self.was_read_once):
            return ""
        return (
            f"The data seem to be ordered ({self.ordered}), and could be read once: the first batches are not like the "
            "others. Give batches that can be read again, or shuffle the rows."
        )
