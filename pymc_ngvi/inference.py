"""`NGVI`, the inference object, and `fit_ngvi`, a fit as one call: options in, approximation out."""

import inspect
import re
import time

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never
from weakref import WeakValueDictionary

import numpy as np
import pymc as pm

from numpy.typing import ArrayLike
from pymc.model import modelcontext
from pymc.variational.inference import Inference
from rich.theme import Theme

from pymc_ngvi.core.linalg import TINY
from pymc_ngvi.core.messages import logger
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import Seed, seed_of
from pymc_ngvi.core.types import Array, Rule, VariationalState
from pymc_ngvi.density import CannotReuse, LogDensity, ModelDensity
from pymc_ngvi.density.shards import ShardedDensity, Shards
from pymc_ngvi.density.streams import BatchSource, StreamDensity
from pymc_ngvi.fitting.modes import ModeSearch
from pymc_ngvi.fitting.options import (
    MOST_ITERATIONS,
    OF_CONSTRUCTOR,
    OPTIONS,
    FitOptions,
    check_callbacks,
    check_n,
    joined_parameters,
    names_a_method,
    options_for,
    refuse_unknown,
    sign,
    split_options,
    takes,
)
from pymc_ngvi.fitting.problem import Problem, problem_of
from pymc_ngvi.fitting.record import SoFar, or_the_first, report_outcome
from pymc_ngvi.fitting.session import Earlier, FitSession, Observer, first_state
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.graphs.backends import Backend
from pymc_ngvi.results.approximation import NGVIApproximation
from pymc_ngvi.results.choice import Candidates, Choice, check_wanted

# --- callbacks of users, which a fit calls after each iteration ---

#: Called with the approximation, the losses (None without ``score``) and the number of the iteration.
type Callback = Callable[[NGVIApproximation, Array | None, int], object]


def observer_of(approx: NGVIApproximation, callbacks: Sequence[Callback]) -> Observer | None:
    """Return what calls them, with the approximation up to date; None where there are none."""

    def observe(q: VariationalState, losses: Array | None, n_iterations: int) -> None:
        approx.set_state(q)
        for callback in callbacks:
            callback(approx, losses, n_iterations)

    return observe if callbacks else None


# --- what a fit is given: a model, shards in its place, or a model whose data come in batches; and its log density ---

#: Of models, by identity, for as long as the result of a fit holds them: the next fit builds nothing anew.
_BUILT: WeakValueDictionary[int, LogDensity] = WeakValueDictionary()

type Batches = Iterable[Mapping[str, ArrayLike]]


def model_given(model: pm.Model | None, shards: object, batches: Batches | None) -> pm.Model | None:
    """Return the model, given or of the context; None where there are shards in its place."""
    if shards is None:
        return modelcontext(model)
    if not isinstance(shards, Shards):
        raise TypeError(f"shards should be pymc_ngvi.Shards(build, keys); got {shards!r}.")
    if model is not None:
        raise TypeError("Give a model or shards: these have models of their own.")
    if batches is not None:
        raise TypeError("Give shards or batches: shards read their data themselves.")
    return None


def density_of(
    model: pm.Model | Shards | tuple[pm.Model, BatchSource],
    last: ModelDensity | None,
    backend: str,
    compile_kwargs: Mapping[str, object] | None,
) -> ModelDensity:
    """Return the log density for the next fit: what was built for the last one serves again, where it can."""
    if isinstance(model, Shards):
        return ShardedDensity(model, backend, compile_kwargs)
    if isinstance(model, tuple):
        return StreamDensity(model[0], model[1], backend, compile_kwargs)
    last = last or _BUILT.get(id(model))
    density, factors = None, None
    if isinstance(last, LogDensity) and last.given is model:
        factors = last.factors_from
        try:
            density = last.again(backend, compile_kwargs)
        except CannotReuse as reason:
            logger.debug(f"The functions of the model are built anew: {reason}.")
    density = density or LogDensity(model, backend, compile_kwargs, factors=factors)
    if factors is None:  # others are not those of the model
        _BUILT[id(model)] = density
    return density


# --- `NGVI`, the inference object: options in, approximation out ---


@dataclass(frozen=True, kw_only=True)
class Arguments(FitOptions):
    """What `NGVI` takes: the options of a fit, its model, seed and start."""

    model: pm.Model | None = field(default=None, kw_only=False)
    shards: Shards | None = None
    batches: Iterable[Mapping[str, ArrayLike]] | None = None
    random_seed: Seed = None
    start: Mapping[str, ArrayLike] | NGVIApproximation | None = None
    start_sigma: Mapping[str, ArrayLike] | float | None = None


class NGVI(Inference):
    """Natural-gradient variational inference.

    Fits a Gaussian on the unconstrained scale, by default with second-order natural-gradient steps. There is no
    learning rate, the number of Monte Carlo draws grows as needed, and the fit stops by itself. Other updates,
    estimators and step rules are options.

    Parameters
    ----------
    model : pymc.Model, optional
        Continuous free variables only; default: the model of the context.
    shards : Shards, optional
        In the place of a model: one whose data are in parts, each evaluated where it is.
    batches : iterable of dict, optional
        The data, a part at a time: arrays for the model's ``pm.Data`` by name. Observed variables that depend on these
        have a ``total_size``, the number of rows of all batches together. Where ``iter(batches)`` begins anew, they are
        read several times; with ``__len__`` and ``__getitem__``, in a new random order each time.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        The same seed gives the same bits for a given backend.
    start : mapping or NGVIApproximation, optional
        Starting means by variable name (constrained scale) or by value-variable name such as ``sd_log__``
        (unconstrained scale); the result of ``pm.find_MAP`` will do. Or an earlier fit, of this model or of one that
        shares variables with it. Its mean is taken and, without ``start_sigma``, its covariance, as far as the family
        can hold it. Of an exact posterior, those of its Gaussian fit are taken.
    start_sigma : mapping or float, optional
        Starting standard deviations on the unconstrained scale. Default: the best of 1, 0.3, 0.1, 0.03 and 0.01, or
        less where log p falls exponentially over 0.01: predictors on scales of thousands.
    family : {"auto", "full", "diagonal", "block", "sparse", "mixture", "student_t"}, optional
        Form of q: a Gaussian with a dense covariance, without correlations, with some blocks of them, or with the
        sparse precision of a hierarchical model; several Gaussians; a multivariate t. "auto", the default, takes
        "sparse" where the model has that structure, "full" otherwise, "diagonal" where neither fits in memory.
    update, estimator, step : str, optional
        Parametrisation, estimator of the gradients, and step rule. Each that is left out gets the default that goes
        with the others; see `pymc_ngvi.fitting.options.ALLOWED`.
    tol : float, default 0.05
        Nats of ELBO that a converged fit in 100 dimensions may still lack. It is in proportion to the dimension, in
        fewer down to a tenth, unless the posterior is far from every q of the family.
    n_draws : int, optional
        Draws in the first set (step="adaptive": 8, a power of 2), or in each iteration (other step rules).
    max_draws : int, optional
        Draws in the largest set of step="adaptive": 1,024.
    base_draws : {"sobol", "antithetic", "plain"}, optional
        Standard normals behind the draws: quasi-random pairs z and -z (step="adaptive"), random pairs (other rules with
        an even number of draws), or independent ones.
    stl : bool, default True
        Sticking the landing: gradients are those of log p - log q, which have no noise where q is the posterior.
    step_size, step_decay : float, optional
        Of the step rules that take them, which have defaults of their own; step k, from 0, has size
        ``step_size / (1 + k)**step_decay``, or ``step_size / (1 + k / 100)**step_decay`` with "ivon".
    window : int, optional
        Iterations over which stochastic step rules average the ELBO; they stop where it rises by less than 0.01 nats
        from one window to the next, over three windows. Default: 1,000 ("snngm", "adam", "sgd"), or as many as make
        1,000 draws, at least 50.
    factor : {"covariance", "precision"}, optional
        The matrix whose Cholesky factor update="euclidean" moves. Default for family="full": the precision.
    blocks : sequence of sequences of str, optional
        With family="block": names of variables, or labels of single coordinates such as ``"z[0,1]"``, that share a
        block. Variables that are not named have a block each. With ``reparam`` and no names, each group has a block.
    reparam : {"rvb1", "rvb2", "noncentred"}, optional
        For hierarchical models: fit group effects relative to their conditional modes and scales given the global
        parameters [2]_. "rvb2": those of the model. "rvb1": those of a quadratic expansion about the data, for Poisson,
        Bernoulli and Normal likelihoods with canonical links. "noncentred": those of the prior. q
        is then no Gaussian on the unconstrained scale, but its density is exact.
    posterior : {"auto", "gaussian", "exact", "nested", "moved"}, default "auto"
        What is returned. "gaussian": the fit. "exact": the posterior up to Monte Carlo error. For this, parameters in
        small blocks that are independent given the others, such as the effects of a group, are integrated by quadrature
        after the Gaussian fit. The others, up to 100, are sampled by importance. In a model without such blocks, all
        parameters are sampled so, up to 15, or 60 of a regression. "nested": of a latent Gaussian model, such as a
        Gaussian process, a random walk, a map or crossed effects. Its hyperparameters, up to 48, are sampled, the
        others are drawn from Gaussians given these, and both are weighted together: exact where weights are even, and
        otherwise approximate. "moved": of any model, draws of the Gaussian fit, or about modes of log p, are
        moved by Hamiltonian trajectories, as many chains at once, until these have arrived. "auto": "exact" and
        "nested", whichever is expected to take less until one is exact, where they do not take too long;
        "moved" where none of these can be relied on, and it takes less than a Gaussian fit, or follows one that
        is not enough; and the Gaussian where there is none, with the reason in ``approx.record.posterior``.
        Where ``family``, ``update``, ``estimator``, ``step`` or ``reparam`` is named, "auto" returns the fit as
        it is.
        "exact", "nested" and "moved" raise a ValueError where the model does not allow it, and `NotExactError` where it
        turns out that there is none. They have draws and moments, but no density; ``approx.gaussian`` is the Gaussian
        fit.
    max_seconds : float, optional
        Estimated seconds that the whole call may take, without compiling: the Gaussian fit ends there ("out of
        seconds"), and an exact or a nested posterior is taken only if it fits into what is left. They are counted in
        evaluations and the sizes of the data, not by a clock: the same call gives the same result on any machine.
        Default: no limit for the fit; what follows it takes three times as long as the fit at most, and 20 seconds.
        Any number of seconds if ``posterior="exact"``, ``"nested"`` or ``"moved"`` asks for it.
    n_components : int or "auto", optional
        Of family="mixture": the largest number of components. "auto" (default) adds components while each gains more
        than ``tol``.
    components : {"full", "diagonal", "sparse"}, optional
        What the components of a mixture are: Gaussians with a dense covariance, without correlations, or with a
        precision that has the sparsity of the model's Hessian. Default: as for ``family="auto"``.

    Raises
    ------
    ValueError
        For a model that can't be fitted, or an option that makes no sense, saying which and what to do.

    Notes
    -----
    ELBO = E_q[log p - log q] in nats, to be maximised; ``hist`` holds the loss, -ELBO.

    References
    ----------
    .. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
       https://doi.org/10.48550/arXiv.2406.01870
    .. [2] L. S. L. Tan (2021). Use of model reparametrization to improve variational Bayes. Journal of the Royal
       Statistical Society: Series B 83(1). https://doi.org/10.1111/rssb.12399

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pm.fit(method=pymc_ngvi.NGVI(random_seed=1), progressbar=False)
    >>> round(float(approx.std_data["x"]), 6)
    2.0
    """

    #: A fit to other data, from which this one begins, and whether it looks for other modes all the same.
    _pilot: NGVIApproximation | None = None
    _is_searched = False

    @takes(Arguments)
    def __init__(self, model: pm.Model | None = None, **options: Any) -> None:
        refuse_unknown(options, NGVI.__init__)
        # Not `super().__init__`: PyMC's builds a symbolic objective, which is not used here.
        self._given = {name: options.get(name, OPTIONS.get(name)) for name in OF_CONSTRUCTOR}
        self._given["model"] = model_given(model, self._given["shards"], self._given["batches"])
        self._options = options_for(self._given)
        self._source: BatchSource | None = None
        self._session: FitSession | None = None
        self._result: NGVIApproximation | None = None  # of the last fit; what it goes into, also where it was stopped
        # What was made for the first fit before it began: users take nodes of `approx` for their callbacks.
        self._prepared: NGVIApproximation | None = None
        self._next_seed: int | None = None
        self._density: ModelDensity | None = None  # of the last fit

    def configure(self, **options: Any) -> None:
        """Change options of the constructor before the next fit; None leaves an option as it is.

        Raises
        ------
        ValueError, TypeError
            As the constructor; nothing is changed then.
        """
        refuse_unknown(options, NGVI.__init__)
        options = {name: value for name, value in options.items() if value is not None}
        given = self._given | options
        validated = options_for(given)
        if given["model"] is not self._given["model"] or validated.has_other_states(options_for(self._given)):
            self._prepared = None
        if "random_seed" in options:
            self._next_seed = None
        self._options, self._given = validated, given

    @property
    def approx(self) -> NGVIApproximation:
        """The approximation of the last fit.

        Before the first fit it has the mean at which that will start; the scale is chosen in the fit. It is the object
        that will be fitted, so that callbacks can use its nodes. Only another model or family takes another object. An
        exact posterior is an object of its own, whose ``gaussian`` is the one that was fitted.
        """
        if self._result is not None:
            return self._result
        if self._prepared is None:
            problem = self._problem(None, None)
            start = self._from(problem.density)
            means = start.mean if isinstance(start, Earlier) else start
            point, scales = problem.start(means, self._given["start_sigma"])
            self._next_seed = self._seed()
            q = problem.on_model_scale(problem.family.from_scale(point, scales[0]))
            self._prepared = NGVIApproximation(problem.density, q, random_seed=self._next_seed)
        return self._prepared

    @property
    def hist(self) -> Array:
        """Loss, -ELBO, of each iteration of the last fit."""
        return np.empty(0) if self._result is None else self._result.hist

    def fit(
        self,
        n: int = MOST_ITERATIONS,
        score: bool | None = None,
        callbacks: Sequence[Callback] | None = None,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        backend: Backend | None = None,
        include_transformed: bool = False,
        compile_kwargs: dict[str, Any] | None = None,
        **unknown: Never,
    ) -> NGVIApproximation:
        """Fit the approximation.

        Parameters
        ----------
        n : int, default 10_000
            The maximum number of iterations; the fit stops earlier by itself. 0 returns the starting approximation.
        score : bool, optional
            False: keep no history of the loss, and pass None to the callbacks in its place.
        callbacks : sequence of callable, optional
            Each is called as ``callback(approx, losses, i)`` after iteration ``i`` = 1, 2, ..., with ``approx`` up to
            date. StopIteration ends the fit.
        progressbar : bool, default True
        progressbar_theme : rich.theme.Theme, optional
        backend : {"auto", "quick", "numba", "c", "jax"}, optional
            How the model is evaluated; see `LogDensity`.
        include_transformed : bool, default False
            Whether ``approx.state`` and ``approx.sample`` also hold the unconstrained variables.
        compile_kwargs : dict, optional
            Options of ``pytensor.function``.

        Returns
        -------
        NGVIApproximation
            Also where the fit did not converge: then with a warning, and ``approx.status`` says what to do.

        Raises
        ------
        ValueError
            Before anything is computed where an option or the model is at fault; StartError (a ValueError) where the
            log density is not finite around the start.
        TypeError
            For an option that does not exist or belongs to another method, saying what to use instead.
        """
        refuse_unknown(unknown, NGVI.__init__, NGVI.fit)
        if unknown:
            raise TypeError(f"{next(iter(unknown))} is an option of NGVI(...), not of its fit: give it there.")
        n, callbacks = check_n(n), check_callbacks(callbacks)
        clock = time.perf_counter()
        with (
            task("Choosing the posterior", enabled=progressbar, theme=progressbar_theme, has_numbers=True),
            SoFar[NGVIApproximation]() as so_far,
        ):
            problem = self._problem(backend, compile_kwargs)
            density, seed = problem.density, self._seed()
            self._next_seed = seed
            choice = Choice(self._options.posterior, seed, self._options.max_seconds)
            is_free = not callbacks and n and self._given["start"] is None and not names_a_method(self._given)
            for pilot in dict.fromkeys((None if self._is_searched else self._pilot_for(density), None)):
                candidates = Candidates(
                    choice, density, NGVIApproximation, options=self._options, so_far=so_far,
                    include_transformed=include_transformed, pilot=pilot,
                )  # fmt: skip
                if has_come := bool(is_free and candidates.come_first()):
                    break
            if not has_come:
                left = None if choice.max_seconds is None else max(candidates.left, TINY)
                self._options = replace(self._options, max_seconds=left)
                with or_the_first(candidates.errors), few_threads(density):
                    approx, problem, rule, q, seed = self._start(problem, include_transformed)
                    is_unsearched = self._pilot_for(density) is not None and not self._is_searched
                    search = None if is_unsearched else ModeSearch.of(problem, self._options, seed)
                    self._session = approx._session = session = FitSession.begin(
                        problem, rule, q, self._options, seed, score=score in (None, True), clock=clock,
                        observer=observer_of(approx, callbacks), search=search,
                    )  # fmt: skip
                    self._result, self._prepared, self._next_seed = approx, None, None
                    candidates.fit(session, approx, n, may_pause=not callbacks)
                candidates.after_fit(n)
            so_far.result = candidates.result()
        fitted, self._result = self._result, so_far.result
        assert self._result.record is not None
        if fitted is None or self._result.record.comes_first:
            self._session = self._prepared = self._next_seed = None
            fitted = self._result
        report_outcome(fitted._state, self._result.record)
        return self._result

    def refine(
        self,
        n: int = MOST_ITERATIONS,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> NGVIApproximation:
        """Go on with the last fit, in place; see `NGVIApproximation.refine`.

        Raises
        ------
        TypeError
            Before the first fit.
        """
        if self._result is None:
            raise TypeError("There is nothing to refine: call fit first.")
        return self._result.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws)

    def run_profiling(self, *args: object, **kwargs: object) -> Never:
        """Not available: there is no compiled step function to profile."""
        raise NotImplementedError(
            "NGVI has no compiled step function to profile. Profile the call of fit with any Python profiler; "
            "approx.compile_seconds and approx.run_seconds say where the time went."
        )

    def _problem(self, backend: str | None, compile_kwargs: dict[str, Any] | None) -> Problem:
        """Return what is to be fitted, if an approximation in its dimension fits into memory."""
        model, shards, batches = (self._given[name] for name in ("model", "shards", "batches"))
        if batches is not None:
            # Where data come from stays the same while the batches do.
            if self._source is None or self._source.given is not batches:
                self._source = BatchSource(batches)
            model = model, self._source
        self._density = density = density_of(shards or model, self._density, backend or "auto", compile_kwargs)
        if not density.n_dim:
            names = ", ".join(repr(v.name) for v in density.layout.variables)
            raise ValueError(f"The free variables of the model ({names}) have no elements: there is nothing to fit.")
        self._options = options_for(self._given, density)
        check_wanted(self._options, density)
        return problem_of(density, self._options)

    def _pilot_for(self, density: ModelDensity) -> NGVIApproximation | None:
        """Return the fit to other data that one begins from, if its variables have the same shapes."""
        if self._pilot is None:
            return None
        then, now = ([(v.value_name, v.shape) for v in of.layout.variables] for of in (self._pilot, density))
        return self._pilot if then == now else None

    def _seed(self) -> int:
        """Return the seed of the next fit: that of the approximation made for it, or a new one."""
        return seed_of(self._given["random_seed"]) if self._next_seed is None else self._next_seed

    def _from(self, density: ModelDensity) -> Mapping[str, ArrayLike] | Earlier | None:
        """Return the means to start from, or the earlier fit."""
        start = self._pilot_for(density) or self._given["start"]
        return Earlier.of(start, density) if isinstance(start, NGVIApproximation) else start

    def _start(
        self, problem: Problem, include_transformed: bool
    ) -> tuple[NGVIApproximation, Problem, Rule, VariationalState, int]:
        """Return the approximation at the start of a fit, what is fitted, the rule, the state, and the seed."""
        seed, density = self._seed(), problem.density
        problem, rule, state, self._options = first_state(
            problem, self._options, seed, self._from(density), self._given["start_sigma"]
        )
        q = problem.on_model_scale(state)
        if self._prepared is not None and type(self._prepared.q) is not type(q):
            self._prepared = None
        approx = self._prepared or NGVIApproximation(density, q)
        approx.restart(density, q, random_seed=seed, include_transformed=include_transformed)
        return approx, problem, rule, state, seed


NGVIApproximation._inference = NGVI  # which fits again where a part of the data is left out


# --- `fit_ngvi`: a fit as one call, and what documentation says of its options ---


def fit_ngvi(
    model_or_n: pm.Model | int | None = None,
    /,
    n: int = MOST_ITERATIONS,
    *,
    model: pm.Model | None = None,
    **options: Any,
) -> NGVIApproximation:
    """Fit a model by natural-gradient variational inference, without going through ``pm.fit``.

    Parameters
    ----------
    model_or_n : pymc.Model or int, optional
        By position only: the model, or ``n`` as in ``pm.fit``.
    n : int, default 10_000
        The maximum number of iterations; the fit stops earlier by itself.
    model : pymc.Model, optional
        Default: the model of the context.
    {options}
    **unknown
        Other options are refused. The message says what to use instead, or which name was meant.

    Returns
    -------
    NGVIApproximation

    Raises
    ------
    TypeError, ValueError
        As `NGVI` and `NGVI.fit`.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0)
    >>> approx = pymc_ngvi.fit_ngvi(model, random_seed=1, progressbar=False)
    >>> approx.converged
    True
    """
    of_constructor, of_fit = split_options(options | _model_and_n(model_or_n, n, model), NGVI.__init__, NGVI.fit)
    return NGVI(**of_constructor).fit(**of_fit)


def options_text() -> str:
    """Return what the documentation of `NGVI` and of `NGVI.fit` says of their options, as entries of numpydoc."""
    entries = [entry for of in (NGVI, NGVI.fit) for entry in re.split(r"\n(?=\S)", _parameters(of.__doc__))]
    ours = [entry for entry in entries if not entry.startswith(("model :", "n :", "**unknown"))]
    return re.sub(r" \[\d+\]_", "", "\n".join(ours))  # the references stay with `NGVI`


def _parameters(docstring: str | None) -> str:
    """Return the section "Parameters" of a numpydoc docstring, without its heading."""
    return inspect.cleandoc(docstring or "").partition("Parameters\n----------\n")[2].partition("\n\n")[0]


# Written in one place and shown in each: by `help(NGVI)`, `help(fit_ngvi)` and `help(pm.fit)`; so are the options.
sign(fit_ngvi, joined_parameters(list(inspect.signature(fit_ngvi).parameters.values())[:-1], NGVI.__init__, NGVI.fit))
fit_ngvi.__doc__ = inspect.cleandoc(fit_ngvi.__doc__ or "").replace("{options}", options_text())


def _model_and_n(first: object, n: object, model: object) -> dict[str, object]:
    """Return the model and ``n`` of a call of `fit_ngvi`, which takes either of them first."""
    if first is None:
        return {"model": model, "n": n}
    if isinstance(first, pm.Model) and model is None:
        return {"model": first, "n": n}
    if not isinstance(first, pm.Model) and n == MOST_ITERATIONS:
        return {"model": model, "n": first}
    raise TypeError(
        f"fit_ngvi takes one model and one n: write fit_ngvi(model, n=...). Got {first!r} first, model={model!r} and "
        f"n={n!r}."
    )
