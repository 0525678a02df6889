"""Draws of an approximate posterior, weighted or not: as traces of PyMC, as trees of xarray, and as moments."""

import inspect
import warnings

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.base import MultiTrace
from pymc.step_methods.hmc import quadpotential
from pymc.variational.opvi import VIState

from pymc_ngvi.core.messages import checked_names, logger, shortened, suggestion
from pymc_ngvi.core.sizes import (
    FIXED_SEED,
    HELD,
    MAX_DENSE_DIM,
    N_CHAINS,
    N_REWEIGHTED,
    Seed,
    check_cov_size,
    check_draws,
    draws_of_chains,
    generator_of,
    seed_of,
)
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import of_batches, quoted
from pymc_ngvi.density.observed_rows import observed_logp
from pymc_ngvi.moves.posterior import MovedDraws
from pymc_ngvi.results.distributions import (
    Posterior,
    constrained_dataset,
    flat_dataset,
    indices_of,
    to_datatree,
    to_multitrace,
)

# --- moments of an approximate posterior by variable: covariances, and what PyMC calls its state ---


def covariance_of(posterior: Posterior, names: str | Sequence[str]) -> xr.DataArray:
    """Return the covariance of some variables; see `NGVIApproximation.cov_of`."""
    layout, dims = posterior.layout, ("unconstrained", "unconstrained_2")
    index = indices_of(layout, names)
    labels = [layout.label(int(i)) for i in index]
    if layout.bambi.centrings.keys() & {label.partition("[")[0] for label in labels}:
        block = np.cov(_uncentred_draws(posterior)[:, index], rowvar=False, ddof=0).reshape(len(index), -1)
    else:
        block = posterior.distribution.cov_block(index)
    return xr.DataArray(block, dims=dims, coords=dict.fromkeys(dims, labels), name="covariance")


def moments_of(posterior: Posterior) -> tuple[Array, Array]:
    """Return unconstrained means and standard deviations, (n_dim,); intercepts of a Bambi model are its own."""
    mean, sd = np.array(posterior.distribution.mean()), np.array(posterior.distribution.sd())
    moved = [v.where for v in posterior.layout.variables if v.value_name in posterior.layout.bambi.centrings]
    if moved:
        draws = _uncentred_draws(posterior)
        for where in moved:
            mean[where], sd[where] = draws[:, where].mean(axis=0), draws[:, where].std(axis=0)
    return mean, sd


def _uncentred_draws(posterior: Posterior) -> Array:
    """Return unconstrained draws with the intercepts of a Bambi model in the place of centred ones.

    Up to 1,000 dimensions, their first two moments are those of a Gaussian.
    """
    n, layout = min(N_REWEIGHTED, max(HELD // posterior.layout.n_dim, 2)), posterior.layout
    theta = posterior.distribution.draw_matched(n, np.random.default_rng(FIXED_SEED))
    values = Constrainer.of(posterior.density, names=frozenset(layout.bambi.centrings))(theta)
    for v in layout.variables:
        if v.value_name in values:
            theta[:, v.where] = values[v.value_name].reshape(n, -1)
    return theta


def constrained_state(posterior: Posterior) -> VIState:
    """Return constrained means and standard deviations; see `NGVIApproximation.state`."""
    q, layout, model = posterior.distribution, posterior.layout, posterior.model
    names, rng = [rv.name for rv in model.free_RVs], np.random.default_rng(FIXED_SEED)
    constrainer, (mean, unconstrained_sd) = (
        Constrainer.of(posterior.density, names=frozenset(names)),
        moments_of(posterior),
    )
    values = constrainer(q.mean()[None])
    theta = posterior.draw(min(N_REWEIGHTED, max(HELD // layout.n_dim, 2)), rng)
    draws = constrainer(theta[np.isfinite(theta).all(axis=1)])  # there are draws that q could not make
    sd = {name: draws[name].std(axis=0, ddof=1) for name in names}
    sd |= {name: of for name, of in layout.unflatten(unconstrained_sd).items() if name in names}
    mean_set = constrained_dataset(model, {n: values[n][0] for n in names})
    sd_set = constrained_dataset(model, sd)
    if posterior.include_transformed:
        mean_set = mean_set.merge(flat_dataset(layout, mean), compat="override")
        sd_set = sd_set.merge(flat_dataset(layout, unconstrained_sd), compat="override")
    return VIState(mean=mean_set, std=sd_set)


# --- draws of an approximate posterior as traces of PyMC and trees of xarray ---


#: Names of variables, or one of them; None for all.
type Names = str | Sequence[str] | None


#: Options of `sample_trace`.
_OF_DRAWS = ("chains", "var_names", "include_transformed", "log_p", "with_batches")
#: All that ``approx.sample`` takes.
_OPTIONS = (
    "draws", *_OF_DRAWS[:-1], "random_seed", "return_inferencedata", "coords", "dims", "log_likelihood", "log_prior",
    "prior", "posterior_predictive",
)  # fmt: skip
#: Options of ``pm.sample`` that are not in its signature.
_OF_SAMPLERS = {"target_accept", "max_treedepth"}


def check_options(given: Mapping[str, object]) -> None:
    """Raise TypeError for an option that ``approx.sample`` does not take."""
    for name in sorted(given.keys() - _OPTIONS):
        is_of_sampler = name in _OF_SAMPLERS.union(inspect.signature(pm.sample).parameters)
        why = "it draws from the fitted posterior, and there is no sampler to set. Leave it out."
        said = why if is_of_sampler else suggestion(name, _OPTIONS, {"random_seed": "seed"})
        raise TypeError(f"approx.sample() does not take {name}={shortened(given[name])}: {said}")


def sample_trace(
    posterior: Posterior,
    draws: int,
    rng: np.random.Generator,
    *,
    chains: int = N_CHAINS,
    var_names: Names = None,
    include_transformed: bool | None = None,
    log_p: bool = False,
    with_batches: bool = True,
    all_coordinates: bool = False,
) -> tuple[MultiTrace, dict[str, Any], Array]:
    """Return draws as a trace, what there is to say of them, and the same unconstrained.

    With ``with_batches=False``, Deterministics that read ``pm.Minibatch`` data are there by name only. Coordinates that
    no variable depends on need not be right, unless ``all_coordinates``.
    """
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    q = posterior.distribution
    transformed = posterior.include_transformed if include_transformed is None else include_transformed
    constrain, names = _constrainer(posterior, var_names, transformed=transformed, with_batches=with_batches)
    read = None if names is None or log_p or all_coordinates else constrain.coordinates()
    theta, stats = posterior.draw(draws_of_chains(draws, chains), rng, read), dict[str, NDArray[np.generic]]()
    seed, discrete = seed_of(rng), posterior.density.summed_out.shown
    values = constrain(theta, random_seed=seed)
    if discrete and (names is None or not names.isdisjoint(discrete)):  # that were summed out
        values |= posterior.density.discrete_given(values, seed)
        values = values if names is None else {name: value for name, value in values.items() if name in names}
    if log_p and not posterior.changed_data():
        stats["log_p"] = posterior.density.logp(theta)
    of_draws, of_all = q.notes(theta, rng, log_p)
    return to_multitrace(posterior.model, values, stats | of_draws, chains), of_all, theta


def sample_tree(
    posterior: Posterior,
    draws: int,
    rng: np.random.Generator,
    *,
    log_likelihood: bool | Names = False,
    **options: Any,
) -> xr.DataTree:
    """Return draws as a tree; see `NGVIApproximation.sample`."""
    asked, model = log_likelihood, posterior.model
    how = {name: options.pop(name) for name in _OF_DRAWS if name in options}
    if posterior.density.has_minibatch and asked:
        raise ValueError(
            "log_likelihood is one of all rows, and the model reads pm.Minibatch data: each draw would have the rows "
            "of another batch. Ask pm.compute_log_likelihood(draws) in a model of all rows, with the same names."
        )
    observed = [str(rv.name) for rv in model.observed_RVs] if asked else []
    names = observed and checked_names(None if isinstance(asked, bool) else asked, observed, option="log_likelihood")
    rows = [observed_logp(posterior.density, name, by_rows=False) for name in names]
    trace, attrs, theta = sample_trace(posterior, draws, rng, all_coordinates=bool(rows), **how)
    more = dict(posterior.distribution.groups(posterior.layout))
    if rows:
        values = {of.name: of(theta).reshape(trace.nchains, len(trace), *of.shape) for of in rows}
        axes = {"chain": np.arange(trace.nchains), "draw": np.arange(len(trace))}
        more["log_likelihood"] = constrained_dataset(model, values, tuple(axes)).assign_coords(axes)
    transformed = how.get("include_transformed")
    shown = how.get("var_names") is not None or (posterior.include_transformed if transformed is None else transformed)
    options["dims"] = posterior.density.summed_out.dims | dict(options.get("dims") or {})
    tree = to_datatree(trace, posterior.model, more, include_transformed=shown, **options)
    if posterior.density.is_sharded:  # the model is that of one shard
        tree = tree.drop_nodes(["observed_data", "constant_data"], errors="ignore")
    for group in {"posterior", "sample_stats"} & set(tree.children):
        tree[group].attrs.update(attrs)
    outcome = {} if posterior.record is None else posterior.record.attrs()
    if posterior.layout.bambi.left_out:
        found = tree["posterior"].to_dataset().assign_attrs(modeling_interface="bambi")
        dims = sorted(filter(found.dims.__contains__, model.coords), key=lambda dim: dim.endswith("__factor_dim"))
        tree["posterior"] = xr.DataTree(found.transpose("chain", "draw", *dims, ...))  # as in Bambi's own results
    for node in (tree, tree["posterior"]):
        node.attrs.update(outcome)
    return tree


def chains_tree(posterior: Posterior, rng: np.random.Generator) -> xr.DataTree:
    """Return chains as they were moved; see `NGVIApproximation.chains`."""
    moved = posterior.distribution.q
    if not isinstance(moved, MovedDraws):
        raise ValueError("There are no chains: a moved posterior has some, pm.fit(..., posterior='moved').")
    posterior.warn_of_changed_data()
    n, n_chains, d = moved.x.shape
    values = posterior.values(moved.x.swapaxes(0, 1).reshape(-1, d), seed_of(rng))
    superchain = np.repeat(np.arange(n_chains) // (n_chains // moved.checks.n_starts), n)
    stats = {"log_p": moved.logp.T.ravel(), "superchain": superchain}
    if moved.checks.n_modes > 1:
        stats |= {"mode": np.repeat(moved.modes, n), "weight": np.repeat(n_chains * moved.of_chains, n)}
        logger.info("The chains stay in their modes: sample_stats has the weight of each.")
    trace = to_multitrace(posterior.model, values, stats, n_chains)
    dims, transformed = posterior.density.summed_out.dims, posterior.include_transformed
    return to_datatree(trace, posterior.model, dims=dims, include_transformed=transformed)


def _constrainer(
    posterior: Posterior, var_names: Names, *, transformed: bool, with_batches: bool
) -> tuple[Constrainer, frozenset[str] | None]:
    """Return what evaluates the named variables but for discrete ones, and the names; None for all of them."""
    of_batch = frozenset() if with_batches else of_batches(posterior.density.model)
    left_out = of_batch | posterior.layout.bambi.left_out
    if var_names is None and not left_out:
        return posterior.constrain, None
    discrete = posterior.density.summed_out.shown
    values = {v.name: v.value_name for v in posterior.layout.variables}
    valid = dict.fromkeys([*values, *(d.name for d in posterior.density.deterministics), *values.values(), *discrete])
    if of_batch and var_names is None:
        logger.info(
            f"Without {quoted(sorted(of_batch))}, of the rows of one minibatch: pm.sample_posterior_predictive has "
            "them, in a model of all rows or of new ones."
        )
    if var_names is None:
        var_names = [name for name in valid if name not in left_out]
    names = frozenset(checked_names(var_names, valid))
    if transformed:
        names |= {values[name] for name in names & values.keys()}
    # Discrete variables are drawn given all others.
    evaluated = names if names.isdisjoint(discrete) else names.difference(discrete).union(values)
    return Constrainer.of(posterior.density, names=evaluated), names


#: How many of the first draws of tuning the covariance of q counts for: as with PyMC's ``init="advi+adapt_diag"``.
_WEIGHT = 50
#: Draws of q for each chain that are tried, at most, for one where log p is finite.
_MAX_TRIES = 100

Covariance = Literal["auto", "dense", "diagonal"]


@dataclass(frozen=True, eq=False)
class SamplerInit:
    """Where NUTS starts, and the mass matrix that it uses: what `NGVIApproximation.sampler_init` returns.

    Parameters
    ----------
    model : pymc.Model
    layout : Layout
        Where each variable is in the flat vector.
    points : ndarray, shape (chains, n_dim)
        Start of each chain: a draw of q, unconstrained.
    initvals : list of dict
        The same on the constrained scale, by name: what ``pm.sample(initvals=)`` takes.
    mean : ndarray, shape (n_dim,)
        Mean of q, unconstrained.
    covariance : ndarray, shape (n_dim, n_dim) or (n_dim,)
        Covariance of q, unconstrained, or the variances alone: the inverse of the mass matrix.

    Notes
    -----
    All chains start where q has mass. What q has missed, such as another mode, is not looked for, and R-hat of these
    chains can't tell.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     rate = pm.Gamma("rate", 2, 1)
    ...     y = pm.Poisson("y", rate, observed=[3, 1, 4])
    ...     approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    >>> init = approx.sampler_init(chains=2, random_seed=2)
    >>> len(init.initvals), sorted(init.initvals[0]), init.covariance.shape
    (2, ['rate'], (1, 1))
    >>> draws = pm.sample(50, tune=50, **init.kwargs(), random_seed=3, progressbar=False, quiet=True)
    >>> dict(draws.posterior.sizes)
    {'chain': 2, 'draw': 50}
    """

    model: pm.Model
    layout: Layout
    points: Array
    initvals: list[dict[str, NDArray[np.generic]]]
    mean: Array
    covariance: Array

    def __repr__(self) -> str:
        """Return the number of chains, the dimension and the kind of the covariance."""
        kind = "dense" if self.is_dense else "diagonal"
        return f"SamplerInit(chains={self.chains}, n_dim={len(self.mean)}, {kind} covariance)"

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.points)

    @property
    def is_dense(self) -> bool:
        """Whether the covariance has entries off the diagonal."""
        return self.covariance.ndim == 2

    def potential(self, *, adapt: bool = False, random_seed: Seed = None) -> quadpotential.QuadPotential:
        """Return the covariance as ``pm.NUTS(potential=)`` takes it.

        Parameters
        ----------
        adapt : bool, default False
            Let tuning change it, as PyMC does by default: after the first 100 draws, the draws of tuning alone count.
            A dense one is of no use then in more than some tens of dimensions.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            ``pm.sample`` gives the potential a seed for each chain anyway.

        Returns
        -------
        pymc.step_methods.hmc.quadpotential.QuadPotential
            ``QuadPotentialFull`` or ``QuadPotentialDiag``, or its ``Adapt`` kind.
        """
        rng = None if random_seed is None else generator_of(random_seed)
        kind = getattr(quadpotential, f"QuadPotential{'Full' if self.is_dense else 'Diag'}{'Adapt' * adapt}")
        if not adapt:
            return kind(self.covariance, rng=rng)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "QuadPotentialFullAdapt is an experimental feature", UserWarning)
            return kind(len(self.mean), self.mean, self.covariance, _WEIGHT, rng=rng)

    def pymc_step(self, *, adapt: bool = False, **nuts: Any) -> pm.NUTS:
        """Return PyMC's NUTS with the mass matrix; compiles the log density and its gradient.

        Parameters
        ----------
        adapt : bool, default False
            As in `potential`.
        **nuts
            Of ``pm.NUTS``: ``target_accept``, ``max_treedepth``, ``compile_kwargs``, ...

        Raises
        ------
        ValueError
            For what is settled here: ``potential``, ``scaling``, ``model``, ``initial_point``.
        """
        taken = sorted({"potential", "scaling", "is_cov", "model", "initial_point", "vars"} & set(nuts))
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: sampler_init sets this already. Leave it out, or make pm.NUTS(potential="
                "init.potential()) yourself."
            )
        start = self.layout.unflatten(self.points[0])  # spares PyMC a compilation
        return pm.NUTS(potential=self.potential(adapt=adapt), model=self.model, initial_point=start, **nuts)

    def kwargs(self, *, adapt: bool = False, **nuts: Any) -> dict[str, Any]:
        """Return arguments for ``pm.sample``: model, chains, starts, and NUTS with the mass matrix.

        Parameters
        ----------
        adapt : bool, default False
            As in `potential`.
        **nuts
            Of ``pm.NUTS``, such as ``target_accept``: ``pm.sample`` does not pass them on to a step that it is given.

        Returns
        -------
        dict
            ``model``, ``chains``, ``initvals``, ``step``. With a ``step``, ``pm.sample`` runs PyMC's own NUTS, where it
            would otherwise take nutpie if that is installed. ``tune`` is not in it: give a number that is smaller than
            the default of 1,000, since the step size alone is left to tune.
        """
        step = self.pymc_step(adapt=adapt, **nuts)
        return {"model": self.model, "chains": self.chains, "initvals": self.initvals, "step": step}

    def nutpie_kwargs(self) -> dict[str, Any]:
        """Return arguments for ``nutpie.compile_pymc_model(model, **init.nutpie_kwargs())``: one start for all chains.

        Nutpie takes one point, and no mass matrix: it has no way to be given one, nor a point for each chain, and the
        ``init_mean`` of ``nutpie.sample`` is not used. The point is the first draw of q. It is not jittered; nutpie
        would otherwise add up to 1 to each unconstrained coordinate, however narrow the posterior is.

        Returns
        -------
        dict
            ``initial_points`` and ``jitter_rvs``.
        """
        return {"initial_points": self.initvals[0], "jitter_rvs": set()}


def sampler_init(posterior: Posterior, chains: int, rng: np.random.Generator, covariance: Covariance) -> SamplerInit:
    """Return initial points and a mass matrix for NUTS; see `NGVIApproximation.sampler_init`."""
    chains, q, density = check_draws(chains, "chains"), posterior.distribution, posterior.density
    if covariance not in ("auto", "dense", "diagonal"):
        raise ValueError(f"covariance should be 'auto', 'dense' or 'diagonal'; got {covariance!r}.")
    what = "reads pm.Minibatch data" if density.has_minibatch else ""
    if density.is_sharded or density.is_streamed:
        what = "has the data of one shard or batch alone"
    if what:
        raise ValueError(
            f"The model {what}, and a sampler needs the log density given all of them. Build the model on all of the "
            "data, and pass it q by start= and start_sigma= of pm.fit."
        )
    points, n_tries = np.empty((0, q.n_dim)), 0
    while len(points) < chains:
        if n_tries == _MAX_TRIES:
            raise ValueError(
                f"log p is finite at {len(points)} of {_MAX_TRIES * chains:,} draws of q: too few to start {chains} "
                "chains. Look at approx.status, and give the variables their support by a prior or a transform."
            )
        theta, n_tries = q.draw(chains, rng), n_tries + 1
        # Reparametrised models can have draws that are NaN.
        finite = np.isfinite(theta).all(axis=1)
        finite[finite] = np.isfinite(density.logp(theta[finite]))
        points = np.concatenate([points, theta[finite]])
    points = points[:chains]
    values = Constrainer.of(density, deterministics=False)(points)
    names = [rv.name for rv in posterior.model.free_RVs]
    initvals = [{name: np.array(values[name][chain]) for name in names} for chain in range(chains)]
    dense = covariance == "dense" or (covariance == "auto" and q.n_dim <= MAX_DENSE_DIM)
    if dense:
        check_cov_size(q.n_dim)
    found = q.cov() if dense else q.sd() ** 2
    if not np.isfinite(found).all():
        raise ValueError(
            f"The covariance of q is not finite (q is a {q.name}): it can't be a mass matrix. Fit with family='full'."
        )
    return SamplerInit(posterior.model, posterior.layout, points, initvals, q.mean(), np.array(found, dtype=np.float64))
