"""Trees of local coordinates as what is inside: log m by quadrature, about centres that it confirms itself.

Nodes are put about the conditional means of the local coordinates, scaled by a Cholesky factor of their covariance. The
quadrature gives these moments anew: where they are far from what was assumed, a block is integrated again about better
ones [1]_.

References
----------
.. [1] J. C. Naylor and A. F. M. Smith (1982). Applications of a method for the efficient computation of posterior
   distributions. Journal of the Royal Statistical Society C 31(3). https://doi.org/10.2307/2347995
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scipy.special import expit

from pymc_ngvi.core.linalg import SMALL
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools
from pymc_ngvi.marginal.pooled import evenly_picked
from pymc_ngvi.marginal.quadrature import (
    WIDE,
    BatchPlan,
    Centres,
    Forest,
    Integral,
    PathRule,
    SomeBlocks,
    TermsOfBlocks,
    blocks_off_centre,
    by_plan,
    corrected_centres,
    integrate,
    references,
)
from pymc_ngvi.marginal.sampler import FLATTENED, Pairs, Ratios, normalised_weights

#: Corrections of centres before a value counts as lost.
_MOST_CORRECTIONS = 8
#: Change of log m, an sd over the globals in nats, that the next rule may bring; while globals are sampled.
TOLERANCE, ROUGH = 0.03, 0.12
#: Points on which rules are compared.
N_COMPARED = 16
#: Part of the mass beyond the ends of a coordinate where rules are compared, too.
_END = 0.01
#: Where other modes are looked for if there is one; standard deviations, of both, by which modes of a tree are apart.
_NOWHERE, _APART = np.empty((0, 0)), 2.0
#: How often what is lost is begun again, from the nearest globals where centres were found by then.
_TURNS = 2


@stored("exact.integrals")
@dataclass(frozen=True, eq=False)
class TreePairs(Pairs):
    """log m at one value of the globals, -inf where centres were not found, and moments of the local coordinates."""

    #: The value; shape (p,).
    g: Array
    #: Conditional means and factors.
    centres: Centres
    #: Third standardised cumulants; shape (n_local,).
    skew: Array


class TreeIntegral:
    """log m(g), the log density of the globals with all local coordinates integrated out."""

    def __init__(
        self,
        terms: TermsOfBlocks,
        forest: Forest,
        first: Callable[[Array], Centres],
        scale: Array | float = 1.0,
        *,
        is_concave: bool = True,
        places: Array = _NOWHERE,
    ) -> None:
        #: Places from where other modes of the trees are looked for, (n, n_local).
        self.terms, self.forest, self._places = terms, forest, places
        #: Centres to begin with, and units of distances between globals, (p,).
        self._first, self._scale, self._is_concave = first, scale, is_concave
        self.rule = references(forest.n_levels)[0] if is_concave else PathRule(WIDE, forest.n_levels)
        #: Change of log m that the next larger rules bring, an sd in nats.
        self.rule_error = float("nan")
        self._known: TreePairs | None = None

    def at(self, g: Array) -> TreePairs:
        """Integrate at globals, (n, p), about centres that are corrected until they are right."""
        size = max(1, AT_ONCE // (self.forest.n_local * self.forest.n_levels**2))
        return TreePairs.joined([self._confirmed(g[start : start + size]) for start in range(0, len(g), size)])

    def by_block(self, g: Array) -> Array:
        """Return the integrals of blocks at globals, (n, n_blocks), also of those that no centre is right for."""
        result = np.empty((len(g), self.forest.n_blocks))
        self._confirmed(g, result)
        return result

    def _confirmed(self, g: Array, by_block: Array | None = None) -> TreePairs:
        n, n_local = len(g), self.forest.n_local
        log_m, lost = np.zeros(n), np.zeros(n, dtype=bool)
        found, skew = Centres.empty(n, self.forest), np.empty((n_local, n)).T
        about, plan = self._begun(g), self.terms.plan(self.forest, n, len(self.rule.nodes))
        for part in plan.parts:
            near = about.of(part.places, part.forest.n_levels)
            one, centres, of_part, pending = self._confirmed_part(part, g, near, plan.size)
            log_m += one.of_globals + one.of_blocks.sum(axis=1)
            if by_block is not None:
                by_block[:, part.blocks] = one.of_blocks
            found.put(slice(None), part.places, centres)
            skew[:, part.places] = of_part
            lost |= pending.any(axis=1)
        log_m = np.where(lost | ~np.isfinite(log_m), -np.inf, log_m)
        return TreePairs(log_m[:, None], log_m[:, None], log_m, g, found, skew)

    def _confirmed_part(
        self, part: SomeBlocks, g: Array, about: Centres, size: int
    ) -> tuple[Integral, Centres, Array, Bools]:
        """Return the integrals of some blocks, their centres, skewness, and which of them are lost."""
        one, found, pending = _about(part, self.rule, g, about, size)
        of_blocks, skew = one.of_blocks, one.shape.skew
        rule = self.rule  # mostly, the first correction by it is enough
        for _ in range(_MOST_CORRECTIONS - 1):
            left = np.flatnonzero(pending.any(axis=1))
            if not len(left):
                break
            again, better, still = _about(part, rule, g[left], found[left], size)
            blocks = pending[left]
            of_blocks[left] = np.where(blocks, again.of_blocks, of_blocks[left])
            places = blocks[:, part.forest.block]
            skew[left] = np.where(places, again.shape.skew, skew[left])
            found = found.replaced(left, better, places)
            pending[left] = blocks & still
            size = max(1, size * len(rule.nodes) // len(rule.sure.nodes))
            rule = rule.sure
        return one._replace(of_blocks=of_blocks), found, skew, pending

    # --- where nodes are put at first ---

    def begin_from(self, points: TreePairs) -> None:
        """Begin from these points alone: what is found then is the same whatever was asked before."""
        self._known, self._scale = None, points.g.std(axis=0)
        self.know(points)

    def know(self, points: TreePairs) -> None:
        """Begin from the nearest of these, too, from now on; of many, the last ones are known."""
        from scipy.spatial import cKDTree

        found = points[np.isfinite(points.log_estimate)]
        if not len(found.g):
            return
        known = found if self._known is None else TreePairs.joined([self._known, found])
        most = max(1, AT_ONCE // (self.forest.n_local * (2 + self.forest.n_levels)))
        self._known = known[max(len(known.g) - most, 0) :]
        self._nearest = cKDTree(self._known.g / self._scale)

    def _begun(self, g: Array) -> Centres:
        if self._known is None:
            return self._first(g)
        return self._known.centres[self._nearest.query(g / self._scale)[1]]

    # --- how many nodes ---

    def settles(self, points: TreePairs, weights: Array) -> bool:
        """Tell whether the nodes are enough at weighted points; where they are not, there are more from then on."""
        rule, order = self.rule, np.argsort(points.g, axis=0)
        # Some points by weight, and the far ends of each coordinate, where more nodes change most.
        total, every = np.cumsum(weights[order], axis=0), np.arange(points.g.shape[1])
        ends = [order[(total < part * total[-1]).sum(axis=0), every] for part in (_END, 1.0 - _END)]
        few = np.unique(np.concatenate([evenly_picked(weights, N_COMPARED, 0.5), *ends]))
        self.rule = rule.sure
        self.choose_rule(self.at(points.g[few]), rule.n_nodes)
        return self.rule == rule

    def choose_rule(self, points: TreePairs, least: int = 0, tolerance: float = TOLERANCE) -> None:
        """Take the fewest nodes, ``least`` or more, whose log m is but for a constant that of the next two rules.

        One more rule may err in the same direction. Where there may be other modes, there are as many nodes as reach
        them.
        """
        rules = references(self.forest.n_levels)
        if not self._is_concave and self._may_have_modes(points):
            least = max(least, WIDE)
        first = min(next((i for i, r in enumerate(rules) if r.n_nodes >= least), len(rules)), len(rules) - 2)
        values = [self._by_rule(rule, points) for rule in rules[first : first + 2]]
        for i in range(first, len(rules) - 1):
            values += [self._by_rule(rule, points) for rule in rules[i + 2 : i + 3]]
            here, *others = values[i - first :]
            self.rule_error = max(float(np.std(other - here)) for other in others)
            if self.rule_error < tolerance:
                self.rule = rules[i] if rules[i].n_nodes >= least else rules[i + 1]
                return
        self.rule = rules[-1]

    def elsewhere(self, points: TreePairs, weights: Array) -> float:
        """Return the largest part of the mass of a tree that is at another mode than its nodes, at some points."""
        if not len(self._places):
            return 0.0
        home = points[evenly_picked(weights, len(self._places), 0.5)]
        begun = replace(home.centres, mean=self._places)
        there = TreeIntegral(self.terms, self.forest, lambda _: begun)._confirmed(home.g).centres
        new, own = (integrate(self.terms, self.forest, self.rule, home.g, at) for at in (there, home.centres))
        sd, is_away = np.sqrt(home.centres.variance() + there.variance()), np.zeros(new.of_blocks.shape, dtype=np.bool_)
        draws, places = np.nonzero(np.abs(there.mean - home.centres.mean) > _APART * sd)
        is_away[draws, self.forest.block[places]] = True
        is_away &= ~blocks_off_centre(self.forest, new.shape, self.rule, new.of_blocks)
        return float(expit(np.where(is_away, new.of_blocks - own.of_blocks, -np.inf).max()))

    def _by_rule(self, rule: PathRule, points: TreePairs) -> Array:
        return integrate(self.terms, self.forest, rule, points.g, points.centres, moments=False).log_marginal

    def _may_have_modes(self, points: TreePairs) -> bool:
        """Tell whether log p is not concave in a local coordinate, given globals at some points."""
        line = PathRule(WIDE, 1).nodes
        with np.errstate(all="ignore"):
            for near in (points[np.arange(i, i + 1)] for i in range(len(points.g))):
                slopes = np.diff(self.terms.terms(near.g, near.centres.at(line))[1][0], axis=0) / np.diff(line, axis=0)
                if (np.diff(slopes, axis=0) > SMALL * np.abs(slopes[1:])).any():
                    return True
        return False


def _about(part: SomeBlocks, rule: PathRule, g: Array, about: Centres, size: int) -> tuple[Integral, Centres, Bools]:
    """Integrate a part, so many values at a time; also return corrected centres, and which blocks need them."""
    own = replace(part, places=slice(None), blocks=slice(None))  # as all that there is
    one = by_plan(BatchPlan(size, [own]), part.forest, rule, g, about)
    off = blocks_off_centre(part.forest, one.shape, PathRule(rule.n_nodes, part.forest.n_levels), one.of_blocks)
    return one, corrected_centres(about, one.shape, part.forest), off


class TreeInside:
    """Trees given globals, of which some are divided by the scales that others are the logarithms of."""

    def __init__(self, integral: TreeIntegral, ratios: Ratios) -> None:
        self._integral, self._ratios, self._is_settled = integral, ratios, False

    def log_m(self, y: Array) -> Array:
        """Return log m, as a density of what is divided."""
        return self._at(y).log_estimate

    def pairs(self, y: Array, n_draws: int, rng: np.random.Generator) -> TreePairs:
        """Return the integrals at globals, as densities of what is divided: they need no draws."""
        points = self._at(y)
        if not self._is_settled and np.isfinite(points.log_estimate).any():
            self._is_settled = True
            weights = normalised_weights(FLATTENED * points.log_estimate)
            if not self._integral.settles(points, weights):  # more draws will not change that
                return self._at(y)
        return points

    def _at(self, y: Array) -> TreePairs:
        g = self._ratios.inverse(y)
        points = self._integral.at(g)
        for _ in range(_TURNS):
            self._integral.know(points)
            found = np.isfinite(points.log_estimate)
            if found.all() or not found.any():
                break
            order = np.argsort(np.concatenate([np.flatnonzero(found), lost := np.flatnonzero(~found)]))
            points = TreePairs.joined([points[found], self._integral.at(g[lost])])[order]
        return points.moved(-self._ratios.log_slope(g))


class NothingInside:
    """A log density of which nothing is integrated."""

    def __init__(self, log_p: Callable[[Array], Array]) -> None:
        self._log_p = log_p

    def log_m(self, g: Array) -> Array:
        """Return log p, -inf where it is not finite."""
        with np.errstate(all="ignore"):
            values = self._log_p(g)
        return np.where(np.isfinite(values), values, -np.inf)

    def pairs(self, g: Array, n_draws: int, rng: np.random.Generator) -> Pairs:
        """Return log p as weights."""
        values = self.log_m(g)
        return Pairs(values[:, None], values[:, None], values)
