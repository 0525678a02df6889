"""Draws of an approximate posterior as traces of PyMC and trees of xarray."""

import logging
import warnings

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from pymc.backends.base import MultiTrace

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.sizes import check_chains, check_draws
from pymc_ngvi.core.values import AnyArray, Array
from pymc_ngvi.density.checks import of_batches, quoted
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.moves.draws import MovedDraws
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.corrections.weighted import weighted_draws
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.posterior import Posterior

logger = logging.getLogger("pymc.ngvi")

#: Names of variables, or one of them; None for all.
type Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Sampling:
    """Options of `NGVIApproximation.sample`, which documents them.

    With ``of_batches=False``, Deterministics that read ``pm.Minibatch`` data are there by name only.
    """

    chains: int = 1
    var_names: Names = None
    importance: str | None = None
    include_transformed: bool | None = None
    log_p: bool = False
    of_batches: bool = True

    def transformed(self, posterior: Posterior) -> bool:
        """Whether to keep the unconstrained variables."""
        return posterior.include_transformed if self.include_transformed is None else self.include_transformed


_PLAIN = Sampling()
#: Groups of a tree that hold data.
_OF_ROWS = ("observed_data", "constant_data")
_ON_ALL_ROWS = "pm.sample_posterior_predictive has them, in a model of all rows or of new ones"


def sample_trace(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    how: Sampling,
) -> tuple[MultiTrace, dict[str, Any]]:
    """Return draws as a trace, and what there is to say of them."""
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    q = posterior.distribution
    constrain, names = _constrainer(posterior, kept, how)
    made = weighted_draws(posterior, check_draws(draws) * check_chains(how.chains), how.importance, rng)
    theta = made.theta
    values = _values(posterior, constrain, names, theta, int(rng.integers(2**31)))
    stats = dict(made.stats)
    if how.log_p and not posterior.changed_data():
        stats["log_p"] = posterior.density.logp(theta) if made.log_p is None else made.log_p
    stats |= q.stats(theta, rng, how.log_p)
    attrs = {**made.attrs, **q.attrs(theta)}
    if (effective := q.effective(len(theta))) < len(theta):
        repeat = attrs.get("distinct_global_draws", 0) < len(theta)
        logger.info(
            f"The effective sample size is {effective:,.0f}: "
            + (
                f"among {len(theta):,} draws, those of the global parameters repeat (distinct_global_draws in the "
                "attributes says how many different ones there are)."
                if repeat
                else f"{len(theta):,} draws are taken from chains, in which successive ones are correlated."
            )
        )
    return to_multitrace(posterior.model, values, stats, how.chains), attrs


def sample_tree(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    how: Sampling = _PLAIN,
    **options: Any,
) -> xr.DataTree:
    """Return draws as a tree; see `NGVIApproximation.sample`."""
    if how.var_names is not None and options.get("log_likelihood"):
        raise ValueError("log_likelihood needs the draws of all free variables: leave var_names out.")
    in_shards = posterior.density.is_sharded
    if in_shards and options.get("log_likelihood"):
        raise ValueError("log_likelihood is one of rows, which are in shards: see `Shards.map`.")
    if posterior.density.has_minibatch and options.get("log_likelihood"):
        raise ValueError(
            "log_likelihood is one of all rows, and the model reads pm.Minibatch data: each draw would have the rows "
            "of another batch. Ask pm.compute_log_likelihood(draws) in a model of all rows, with the same names."
        )
    trace, attrs = sample_trace(posterior, kept, draws, rng, how)
    more = posterior.distribution.groups(posterior.layout)
    shown = how.transformed(posterior) or how.var_names is not None
    options["dims"] = posterior.dims | dict(options.get("dims") or {})
    tree = to_datatree(trace, posterior.model, more, include_transformed=shown, **options)
    if in_shards:  # the model is that of one shard
        tree = xr.DataTree.from_dict({name: node for name, node in tree.children.items() if name not in _OF_ROWS})
    for group in {"posterior", "sample_stats"} & set(tree.children):
        tree[group].attrs.update(attrs)
    outcome = {} if posterior.record is None else posterior.record.attrs()
    outcome |= {} if kept.verdict is None else {"verdict": kept.verdict}
    for node in (tree, tree["posterior"]):
        node.attrs.update(outcome)
    return tree


def chains_tree(posterior: Posterior, rng: np.random.Generator) -> xr.DataTree:
    """Return chains as they were moved; see `NGVIApproximation.chains`."""
    moved = getattr(getattr(posterior.distribution, "q", None), "rest", None)
    if not isinstance(moved, MovedDraws):
        raise ValueError("There are no chains: a moved posterior has some, pm.fit(..., posterior='moved').")
    posterior.warn_of_changed_data()
    n, n_chains, d = moved.x.shape
    one_by_one = moved.x.swapaxes(0, 1).reshape(-1, d)
    values = posterior.values(one_by_one, int(rng.integers(2**31)))
    superchain = np.repeat(np.arange(n_chains) // (n_chains // moved.checks.n_starts), n)
    stats = {"log_p": moved.logp.T.ravel(), "superchain": superchain}
    if moved.checks.n_modes > 1:
        stats |= {"mode": np.repeat(moved.modes, n), "weight": np.repeat(n_chains * moved.of_chains, n)}
        logger.info("The chains stay in their modes: sample_stats has the weight of each.")
    trace = to_multitrace(posterior.model, values, stats, n_chains)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found chain dimension to be longer")  # so they are
        return to_datatree(
            trace, posterior.model, dims=posterior.dims, include_transformed=posterior.include_transformed
        )


def _values(
    posterior: Posterior, constrain: Constrainer, names: frozenset[str] | None, theta: Array, random_seed: int
) -> dict[str, AnyArray]:
    """Return the named variables at draws, discrete ones that were summed out included; None for all."""
    values = constrain(theta, random_seed=random_seed)
    discrete = posterior.density.summed_out_shown
    if not discrete or (names is not None and names.isdisjoint(discrete)):
        return values
    values |= posterior.density.discrete_given(values, random_seed)
    return values if names is None else {name: value for name, value in values.items() if name in names}


def _constrainer(posterior: Posterior, kept: Kept, how: Sampling) -> tuple[Constrainer, frozenset[str] | None]:
    """Return what evaluates the named variables but for discrete ones, and the names; None for all of them."""
    left_out = frozenset() if how.of_batches else of_batches(posterior.density.model)
    if how.var_names is None and not left_out:
        return posterior.constrain, None
    discrete = posterior.density.summed_out_shown
    values = {v.name: v.value_name for v in posterior.layout.variables}
    valid = dict.fromkeys([*values, *(d.name for d in posterior.density.deterministics), *values.values(), *discrete])
    if how.var_names is None:
        logger.info(f"Without {quoted(sorted(left_out))}, of the rows of one minibatch: {_ON_ALL_ROWS}.")
        shown = frozenset(valid) - left_out
        return narrow(posterior, kept, shown), shown
    names = frozenset([how.var_names] if isinstance(how.var_names, str) else how.var_names)
    if unknown := sorted(names - valid.keys()):
        raise ValueError(f"var_names has {unknown[0]!r}, which the model has not: {suggestion(unknown[0], valid)}")
    if not names:
        raise ValueError("var_names is empty: name at least one variable, or leave it out for all of them.")
    if how.transformed(posterior):
        names |= {values[name] for name in names & values.keys()}
    # Discrete variables are drawn given all others.
    evaluated = names if names.isdisjoint(discrete) else names.difference(discrete).union(values)
    return narrow(posterior, kept, evaluated), names


def narrow(posterior: Posterior, kept: Kept, names: frozenset[str]) -> Constrainer:
    """Return what evaluates some variables, kept until others are asked for."""
    if kept.narrow is None or kept.narrow.names != names:
        kept.narrow = Constrainer.of(posterior.density, names=names)
    return kept.narrow
