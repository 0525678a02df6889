"""What a fit needs to go on in another process."""

from dataclasses import dataclass, replace

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Rule, RuleState
from pymc_ngvi.fitting.loop import LoopState
from pymc_ngvi.fitting.modes.found import Searched
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.steps.adaptive.rule import Adaptive
from pymc_ngvi.steps.adaptive.state import AdaptiveState


@stored("fit.snapshot")
@dataclass(frozen=True)
class Snapshot:
    """All that a fit needs to go on in another process, beside the model."""

    options: FitOptions
    seed: int
    scored: bool
    #: Without what follows from the rest of it.
    state: LoopState
    seconds: float
    compile_seconds: float
    #: Evaluations so far.
    n_gradients: int
    n_hessians: int
    #: What a reparametrised density has learned.
    memory: dict[str, object]
    #: What came of a search for other modes, if there was one.
    searched: Searched | None = None
    #: Whether other modes are yet to be looked for.
    is_to_search: bool = False


def thinned(rule: Rule, state: RuleState) -> RuleState:
    """Return a state without its base draws and the draws of q, if the rule makes the same bits again."""
    if not (isinstance(rule, Adaptive) and isinstance(state, AdaptiveState)):
        return state
    base, theta = state.base, state.evaluation.theta
    again = rule.base_draws(state.level, base.n_draws, state.q)
    if not (_same(again.z, base.z) and _same(state.q.draws(again.z), theta)) or again.n_replicates != base.n_replicates:
        return state
    return replace(state, base=replace(base, z=base.z[:0]), evaluation=replace(state.evaluation, theta=theta[:0]))


def _same(left: Array, right: Array) -> bool:
    return bool(np.array_equal(left, right)) and left.flags.f_contiguous == right.flags.f_contiguous


def filled(rule: Rule, state: RuleState) -> RuleState:
    """Return a state as it was before `thinned`."""
    if not (isinstance(rule, Adaptive) and isinstance(state, AdaptiveState)) or len(state.base.z):
        return state
    base = rule.base_draws(state.level, len(state.evaluation.logp), state.q)
    return replace(state, base=base, evaluation=replace(state.evaluation, theta=state.q.draws(base.z)))
