"""The fitted model in coordinates whitened by the approximation, for other samplers; their draws, mapped back."""

import importlib.util

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from pymc.step_methods.hmc import quadpotential

from pymc_ngvi.core.seeds import Seed, generator_of
from pymc_ngvi.core.sizes import check_chains
from pymc_ngvi.core.states import base_draws_of
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density.whitened import WHITENED, serve_jax, whitened_model
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.samplers import refuse_part_of_data, starts

#: Groups of draws that `Whitened.unwhiten` makes anew, or leaves out.
_OF_DRAWS = ("posterior", "warmup_posterior", "observed_data", "constant_data")
#: Points at which log p has to be finite for chains to start at points like these.
_N_SIGNS = 20


@dataclass(frozen=True, eq=False)
class Whitened:
    r"""The fitted model in coordinates z with :math:`\theta = \mu + C z`: what `NGVIApproximation.whitened` returns.

    Where the approximation is good, z is nearly standard normal: samplers need no mass matrix, hardly any tuning, and
    few leapfrog steps. The posterior is that of the model, however good the approximation is.

    Parameters
    ----------
    model : pymc.Model
        One free variable, ``whitened``, (n_dim,), and a Potential ``log_p``. It reads the data of the fitted model as
        they are when it samples.
    gaussian : GaussianState
        Of the mean and of C: q, or what stands for it where q is a mixture or a pool of draws.
    posterior : Posterior
        Of the fitted model.

    Notes
    -----
    Chains start at draws of the approximation. What it has missed, such as another mode, is not looked for, and R-hat
    of these chains can't tell.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     rate = pm.Gamma("rate", 2, 1)
    ...     y = pm.Poisson("y", rate, observed=[3, 1, 4])
    ...     approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    >>> white = approx.whitened()
    >>> draws = pm.sample(50, tune=50, **white.kwargs(chains=2, random_seed=2), progressbar=False, quiet=True)
    >>> sorted(white.unwhiten(draws)["posterior"].data_vars)
    ['rate']
    """

    model: pm.Model
    gaussian: GaussianState
    posterior: Posterior

    def __repr__(self) -> str:
        """Return the dimension, and by what it is whitened."""
        return f"Whitened(n_dim={self.n_dim}, by a {type(self.gaussian).__name__})"

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.posterior.layout.n_dim

    # --- between the two scales ---

    def to_model(self, z: Array) -> Array:
        """Return whitened points, (n, n_dim), on the unconstrained scale of the model."""
        return self.gaussian.draws(np.asarray(z, dtype=np.float64))

    def to_whitened(self, theta: Array) -> Array:
        """Return points on the unconstrained scale of the model, (n, n_dim), in whitened coordinates."""
        return base_draws_of(self.gaussian, np.asarray(theta, dtype=np.float64))

    # --- for samplers ---

    def initial_points(self, n: int = 4, random_seed: Seed = None) -> Array:
        """Return whitened draws of the approximation at which log p is finite, (n, n_dim).

        Parameters
        ----------
        n : int, default 4
            At least 1: a point for each chain.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Raises
        ------
        ValueError
            Where log p is not finite at the draws.
        """
        return self.to_whitened(starts(self.posterior, check_chains(n), generator_of(random_seed)))

    def kwargs(self, chains: int = 4, random_seed: Seed = None, **nuts: Any) -> dict[str, Any]:
        """Return arguments for ``pm.sample``, which then runs PyMC's NUTS with the identity for a mass matrix.

        Parameters
        ----------
        chains : int, default 4
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the starts.
        **nuts
            Of ``pm.NUTS``, such as ``target_accept``.

        Returns
        -------
        dict
            ``model``, ``chains``, ``initvals``, ``step``. ``tune`` is not in it: the step size alone is tuned, for
            which 100 draws do.
        """
        initvals = self._initvals(chains, random_seed)
        potential = quadpotential.QuadPotentialDiag(np.ones(self.n_dim))
        step = pm.NUTS(potential=potential, model=self.model, initial_point=initvals[0], **nuts)
        return {"model": self.model, "chains": chains, "initvals": initvals, "step": step}

    def nutpie_kwargs(self) -> dict[str, Any]:
        """Return arguments for ``nutpie.compile_pymc_model(white.model, **white.nutpie_kwargs())``.

        Nutpie makes its first mass matrix of the gradient at the start, and that of a standard normal is -z. So a chain
        starts at random signs, entries of 1 and -1 that differ between chains: the mass matrix is about the identity at
        once, and 100 tuning draws do. Where log p is not finite at such points, all chains start at one draw of the
        approximation.

        Returns
        -------
        dict
            ``initial_points`` and ``jitter_rvs``.
        """
        trial = np.sign(np.random.default_rng(0).standard_normal((_N_SIGNS, self.n_dim)))
        at_signs = bool(np.isfinite(self.posterior.density.logp(self.to_model(trial))).all())
        start = 2.0 * pm.Bernoulli.dist(0.5, shape=self.n_dim) - 1.0 if at_signs else self.initial_points(1, 0)[0]
        return {"initial_points": {WHITENED: start}, "jitter_rvs": set()}

    def jax_kwargs(self, chains: int = 4, random_seed: Seed = None) -> dict[str, Any]:
        """Return arguments for ``pm.sample(nuts_sampler="blackjax", **white.jax_kwargs())``, or ``"numpyro"``.

        Where the factor of q is sparse, JAX calls back to compiled code on the host, chain by chain: ask for these
        arguments before you sample, since JAX knows of it from then on.

        Raises
        ------
        ImportError
            Where there is no JAX.

        Returns
        -------
        dict
            ``model``, ``chains`` and ``initvals``.
        """
        if importlib.util.find_spec("jax") is None:
            raise ImportError("Samplers of JAX need JAX, which is not installed: pip install jax.")
        serve_jax()
        return {"model": self.model, "chains": chains, "initvals": self._initvals(chains, random_seed)}

    def _initvals(self, chains: int, random_seed: Seed) -> list[dict[str, Array]]:
        return [{WHITENED: point} for point in self.initial_points(chains, random_seed)]

    # --- from samplers ---

    def unwhiten(self, draws: xr.DataTree, random_seed: int | None = None) -> xr.DataTree:
        """Return draws of `model` as draws of the fitted model.

        Parameters
        ----------
        draws : xarray.DataTree
            What a sampler returned for `model`.
        random_seed : int, optional
            Seeds Deterministics that draw random numbers; without effect on others.

        Returns
        -------
        xarray.DataTree
            Group ``posterior`` holds free variables on their constrained scale and Deterministics, with the dims,
            coords and attributes of samplers. ``sample_stats`` and other groups are those of the sampler; draws of the
            warmup are left out.

        Raises
        ------
        ValueError
            Where these are no draws of `model`.
        """
        z = self._draws_of(draws)
        posterior = self.posterior
        values = posterior.values(self.to_model(z.reshape(-1, self.n_dim)), random_seed)
        trace = to_multitrace(posterior.model, values, {}, len(z))
        shown = posterior.include_transformed
        found = to_datatree(trace, posterior.model, dims=posterior.dims, include_transformed=shown)
        given = draws["posterior"]
        found["posterior"] = xr.DataTree(
            found["posterior"].to_dataset().assign_coords({name: given[name].values for name in ("chain", "draw")})
        )
        found["posterior"].attrs = dict(given.attrs)
        for name in draws.children if isinstance(draws, xr.DataTree) else draws.groups():
            if name not in _OF_DRAWS:
                found[name] = xr.DataTree(_dataset(draws[name]))
        found.attrs = dict(draws.attrs)
        return found

    def _draws_of(self, draws: xr.DataTree) -> Array:
        """Return whitened draws, (n_chains, n_draws, n_dim)."""
        try:
            found = draws["posterior"][WHITENED].transpose("chain", "draw", ...).values
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"draws should be those of the whitened model, with {WHITENED!r} in the group 'posterior'; got "
                f"{_described(draws)}. Sample white.model, and pass on what the sampler returns."
            ) from error
        if found.shape[2:] != (self.n_dim,):
            raise ValueError(
                f"The draws have {found.shape[2:]} numbers each, and this model has {self.n_dim} coordinates: they are "
                "of another whitened model."
            )
        return np.asarray(found, dtype=np.float64)


def _dataset(group: Any) -> xr.Dataset:
    return group.to_dataset() if isinstance(group, xr.DataTree) else group


def _described(draws: object) -> str:
    """Return the class of draws, and what they hold."""
    name = f"a {type(draws).__name__}"
    if isinstance(draws, Mapping) and "posterior" in draws:
        return f"{name} with {', '.join(map(repr, draws['posterior'].data_vars))} there"
    return name


def whitened(posterior: Posterior) -> Whitened:
    """Return the model in whitened coordinates; see `NGVIApproximation.whitened`."""
    refuse_part_of_data(posterior)
    plan = posterior.distribution.plan(posterior.density)
    if plan.transform is not None:
        raise ValueError(
            f"{posterior.kind[0].upper()}{posterior.kind[1:]} is a Gaussian in other coordinates than the model's, "
            "those of reparam: it does not whiten these. Fit without reparam."
        )
    gaussian = plan.gaussian
    if not np.isfinite(gaussian.sd()).all():
        raise ValueError(
            f"The standard deviations of q are not finite (q is {posterior.kind}): it can't whiten. Fit with "
            "family='full'."
        )
    return Whitened(whitened_model(posterior.density, gaussian), gaussian, posterior)
