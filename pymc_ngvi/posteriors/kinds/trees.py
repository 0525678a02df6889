"""Exact posteriors: trees of local coordinates are integrated by quadrature, the globals sampled."""

from typing import NamedTuple

from pymc_ngvi.core import prices
from pymc_ngvi.core.prices import UsedUp, Work
from pymc_ngvi.core.refusal import Failed, Reason, Unavailable
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.exact import exact_posterior, forest_of, n_values
from pymc_ngvi.marginal.forest import MOST_PLAIN, Forest
from pymc_ngvi.marginal.nodes import first_rule
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart

#: Globals beyond which another posterior is to be tried before it, and the chance that it is exact then.
MANY_GLOBALS, _WITH_MANY_GLOBALS = 30, 1.0 / 30.0
#: Seconds that proposals and moments take in trees, beside values.
_BESIDE_TREES = 0.1


class TreeWork(NamedTuple):
    """What the exact posterior takes: values of log p, where a cheap rule will do, seconds of one, seconds beside."""

    n_values: float
    each: float
    beside: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the exact posterior."""
        return self.beside + self.n_values * self.each

    @classmethod
    def of(cls, forest: Forest, each: float) -> "TreeWork":
        """Return that of globals and trees."""
        n_nodes = len(first_rule(forest.n_levels).nodes) if forest.n_local else 1
        n = n_nodes * n_values(forest.n_globals, n_nodes * each)
        return cls(n, each, _BESIDE_TREES if forest.n_local else 0.0)


def work_of(forest: Forest, density: ModelDensity, *, by_rows: bool) -> TreeWork:
    """Return what the exact posterior takes; by rows: where values of log p are those of its rows."""
    rows = density.by_rows.found if by_rows else None
    n_rows = 0 if rows is None else rows.n_rows
    if forest.n_local and n_rows:
        return TreeWork.of(forest, prices.of_node(n_rows))
    return TreeWork.of(forest, prices.of_value(density.gradient_seconds))


class TreeKind(PosteriorKind[Forest]):
    """Globals sampled, trees integrated by quadrature; of few parameters without trees, all are sampled."""

    name = "exact"

    def possible(self, density: ModelDensity) -> Forest:
        """Return globals and trees."""
        return forest_of(density)

    def chance(self, found: Forest) -> float:
        """Return 1, but with many globals beside trees, which are seldom sampled well."""
        return _WITH_MANY_GLOBALS if found.n_local and found.n_globals > MANY_GLOBALS else 1.0

    def seconds(self, found: Forest, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what it takes."""
        return work_of(found, density, by_rows=by_rows).seconds

    def run(self, start: PosteriorStart, found: Forest, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior: only an exact one is worth anything."""
        assert start.q is not None
        each = work_of(found, start.density, by_rows=start.by_rows).each
        try:
            state = exact_posterior(
                start.density, start.q, found, start.seed, each, lambda n: work.expect(n * each), start.others
            )
        except UsedUp:
            raise
        except Unavailable as reason:
            raise Failed(reason.code, reason.sentence, reason.on_request) from None
        if not state.checks.tells_limits:
            is_plain = not found.n_local and found.n_globals <= MOST_PLAIN
            raise Failed(Reason.ELSEWHERE if is_plain else Reason.NOT_PASSED, "; ".join(state.checks.failures))
        return state

    def is_plain(self, found: Forest) -> bool:
        """Tell whether there are no trees."""
        return not found.n_local
