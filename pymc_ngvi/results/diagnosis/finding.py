"""One thing that a diagnosis has found: a sentence, and what may help."""

from dataclasses import dataclass

#: By what quantities are seen to be off, in a clause that they end.
MOVED = "draws that are moved towards the posterior drift"
SCORED = "gradients of log p at draws tell of a drift"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Parameters
    ----------
    text : str
        A sentence.
    cure : str
        Another one; empty where there is nothing to do.
    serious : bool
        Whether q is not reliable for it.
    """

    text: str
    cure: str
    serious: bool

    def __str__(self) -> str:
        """Return both sentences."""
        return f"{self.text} {self.cure}".rstrip()


def in_sds(value: float, se: float) -> str:
    """Return a shift in posterior standard deviations, with its error."""
    return f"{value:+.2f} ± {se:.2f} sd"


def in_percent(value: float, se: float) -> str:
    """Return a ratio in percent, with its error."""
    return f"{100 * value:+.0f} ± {100 * se:.0f} %"
