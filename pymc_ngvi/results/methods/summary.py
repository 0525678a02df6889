"""What an approximation says of itself: a summary, and a card in notebooks."""

from typing import Any

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.summary.summary import Summary, card_of, summarise


class SummaryMethods(Fitted):
    """A summary, and a card in notebooks."""

    def summary(
        self,
        draws: int = 2_000,
        *,
        group_effects: bool = False,
        khat_draws: int | None = 10_000,
        random_seed: Seed = None,
        **kwargs: Any,
    ) -> Summary:
        """Return the outcome of the fit, k-hat and a table of the constrained variables, ready to print.

        The table of a model with groups begins with the parameters of the population, the fixed effects. Standard
        deviations and correlations of the effects of each group follow.

        Parameters
        ----------
        draws : int, default 2_000
            Behind the table.
        group_effects : bool, default False
            Show the effects of each group, too.
        khat_draws : int or None, default 10_000
            None leaves k-hat out, and what a mixture gains over one Gaussian.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        **kwargs
            Passed to ``arviz_stats.summary``. ``kind`` is "stats" by default: effective sample sizes and R-hat say
            nothing about independent draws. With ``var_names``, ``filter_vars`` or ``coords`` the table shows just
            what they name.

        Returns
        -------
        Summary

        Notes
        -----
        Which variables are effects of groups is read from the model. Effects have an axis along which they depend on
        each other through other parameters only, and a parameter in their prior or one that multiplies them. Two kinds
        of variables are left out: Deterministics with a value for each of more than 20 observations, and standardised
        effects that others are computed from. A sentence below the table says so.
        """
        return summarise(
            self._posterior, self._kept, draws, self.generator(random_seed),
            group_effects=group_effects, khat_draws=khat_draws, options=kwargs,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return card_of(self._posterior, self._kept)
