"""Exact posteriors: trees of local coordinates are integrated by quadrature, the globals sampled."""

from pymc_ngvi.core.prices import UsedUp, Work
from pymc_ngvi.core.refusal import Failed, Reason, Unavailable
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.exact import exact_posterior, forest_of, n_values, seconds_of_node
from pymc_ngvi.marginal.forest import MOST_PLAIN, Forest
from pymc_ngvi.marginal.nodes import references
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart

#: The chance that it is exact with more globals than plain models have.
_WITH_MANY_GLOBALS = 1.0 / 3.0
#: Seconds that proposals and moments take in trees, beside values.
_BESIDE_TREES = 0.1


class TreeKind(PosteriorKind[Forest]):
    """Globals sampled, trees integrated by quadrature; of few parameters without trees, all are sampled."""

    name = "exact"

    def possible(self, density: ModelDensity) -> Forest:
        """Return globals and trees."""
        return forest_of(density)

    def chance(self, found: Forest) -> float:
        """Return 1, but with many globals beside trees, which are not always sampled well."""
        return _WITH_MANY_GLOBALS if found.n_local and found.n_globals > MOST_PLAIN else 1.0

    def seconds(self, found: Forest, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what it takes."""
        each = seconds_of_node(found, density, by_rows=by_rows)
        if not found.n_local:
            return each * n_values(found.n_globals, each)
        n_nodes = len(references(found.n_levels)[1].nodes)
        return _BESIDE_TREES + n_nodes * each * n_values(found.n_globals, n_nodes * each)

    def run(self, start: PosteriorStart, found: Forest, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior: only an exact one is worth anything."""
        assert start.q is not None
        each = seconds_of_node(found, start.density, by_rows=start.by_rows)
        try:
            state = exact_posterior(
                start.density, start.q, found, start.seed, lambda n: work.expect(n * each), start.others,
                of_other_data=start.of_other_data,
            )  # fmt: skip
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
