"""What a fit says of itself and of the parameters, as a text and a table."""

import shutil
import textwrap

from dataclasses import dataclass
from typing import Any

from pymc_ngvi.diagnostics import FitReport

#: Rows of the table that a summary prints; ``table`` has them all.
_MAX_ROWS = 60
#: Characters in a line of a printed summary, at most; fewer on a narrow terminal.
_MAX_WIDTH = 100


@dataclass(frozen=True)
class Summary:
    """What `NGVIApproximation.summary` returns: prints as text, and as HTML in notebooks.

    Parameters
    ----------
    lines : tuple of str
        Outcome of the fit, cure where it did not converge, k-hat and what it means.
    table : pandas.DataFrame
        Mean, standard deviation and interval of each constrained variable.
    khat : float or None
        None where it was not computed.
    """

    lines: tuple[str, ...]
    table: Any
    khat: float | None

    def __str__(self) -> str:
        """Return the text, its sentences wrapped to the width of the terminal."""
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        wrapped = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in self.lines]
        return "\n".join([*wrapped, "", self.table.to_string(max_rows=_MAX_ROWS), *self._cut()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        paragraphs = "".join(f"<p>{escape(line)}</p>" for line in self.lines)
        below = "".join(f"<p>{line}</p>" for line in self._cut())
        return paragraphs + str(self.table.to_html(max_rows=_MAX_ROWS)) + below

    def _cut(self) -> list[str]:
        """Return the line that says that the table is longer than what is shown, where it is."""
        return [f"({len(self.table):,} rows; all of them are in .table)"] if len(self.table) > _MAX_ROWS else []


class SummaryReport(FitReport):
    """The part of an approximation that prints a summary."""

    def summary(
        self,
        draws: int = 2_000,
        *,
        khat_draws: int | None = 10_000,
        random_seed: Any = None,
        **kwargs: Any,
    ) -> Summary:
        """Return the outcome of the fit, k-hat and a table of the constrained variables, ready to print.

        Parameters
        ----------
        draws : int, default 2_000
            Behind the table.
        khat_draws : int or None, default 10_000
            None leaves k-hat out, and what a mixture gains over one Gaussian.
        random_seed : int, Generator or None
        **kwargs
            Passed to ``arviz_stats.summary``. ``kind`` is "stats" by default: effective sample sizes and R-hat say
            nothing about independent draws.

        Returns
        -------
        Summary
        """
        from arviz_stats import summary as table_of  # .7 s to import

        rng = self.generator(random_seed)
        tree = self.sample(draws, random_seed=rng, log_p=False)
        table = table_of(tree, **{"kind": "stats", **kwargs})
        lines, khat = self._verdict_lines(khat_draws, rng)
        return Summary(lines, table, khat)
