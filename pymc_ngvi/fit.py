"""`NGVI`, the inference object, and `fit_ngvi`: options in, approximation out."""

import logging
import sys
import time
import warnings

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pymc as pm

from pymc.model import modelcontext
from pymc.util import _get_seeds_per_chain
from pymc.variational.inference import Inference
from rich.theme import Theme
from threadpoolctl import threadpool_limits

from pymc_ngvi import loop, starting
from pymc_ngvi.approximation import NGVIApproximation
from pymc_ngvi.linalg import check_memory
from pymc_ngvi.model import LogDensity
from pymc_ngvi.options import FitOptions, check_n, refuse_unknown
from pymc_ngvi.progress import FitProgress
from pymc_ngvi.registry import AXES
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.status import ConvergenceWarning, Status
from pymc_ngvi.types import Array

# A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")

#: Options of the constructor that `FitOptions` checks.
_VALIDATED = ("family", "update", "estimator", "step", "tol", "n_draws", "max_draws")


class NGVI(Inference):
    """Natural-gradient variational inference.

    Fits a Gaussian on the unconstrained scale with second-order natural-gradient steps. There is no learning rate; the
    number of Monte Carlo draws grows by itself; the fit stops by itself.

    Parameters
    ----------
    model : pymc.Model, optional
        Continuous free variables only; default: the model of the context.
    random_seed : int, Generator or None
        The same seed gives the same bits for a given backend.
    start : mapping, optional
        Starting means by variable name (constrained scale) or by value-variable name such as ``sd_log__``
        (unconstrained scale); the result of ``pm.find_MAP`` will do.
    start_sigma : mapping or float, optional
        Starting standard deviations on the unconstrained scale. Default: the best of 1, .3, .1, .03 and .01.
    family, update, estimator, step : str, optional
        Entries of the four axes (see `pymc_ngvi.registry.ALLOWED`); each left out gets the default that goes with the
        others.
    tol : float, default 0.05
        Nats of ELBO that may be left to gain (in fewer than 100 dimensions: in proportion to the dimension).
    n_draws, max_draws : int
        First and largest number of draws in one set; powers of 2.

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

    def __init__(
        self,
        model: pm.Model | None = None,
        *,
        random_seed: Any = None,
        start: Mapping[str, Any] | None = None,
        start_sigma: Mapping[str, Any] | float | None = None,
        family: str | None = None,
        update: str | None = None,
        estimator: str | None = None,
        step: str | None = None,
        tol: float = 0.05,
        n_draws: int = 8,
        max_draws: int = 1024,
    ) -> None:
        # Not `super().__init__`: PyMC's builds a symbolic objective, which we have no use for.
        self._given = {
            "model": modelcontext(model),
            "random_seed": random_seed,
            "start": start,
            "start_sigma": start_sigma,
            "family": family,
            "update": update,
            "estimator": estimator,
            "step": step,
            "tol": tol,
            "n_draws": n_draws,
            "max_draws": max_draws,
        }
        self._options = FitOptions.validated(**{k: self._given[k] for k in _VALIDATED})
        self._approx: NGVIApproximation | None = None
        self._loop_state: loop.LoopState | None = None
        self._callbacks: list[Callable[..., Any]] = []
        self._score = True
        self.hist = np.empty(0)
        self.state = None

    def configure(self, **options: Any) -> None:
        """Change options of the constructor before the next fit; None leaves an option as it is.

        Raises
        ------
        ValueError
            As the constructor; nothing is changed then.
        """
        given = self._given | {k: v for k, v in options.items() if v is not None}
        self._options = FitOptions.validated(**{k: given[k] for k in _VALIDATED})
        self._given = given

    @property
    def approx(self) -> NGVIApproximation:
        """The approximation; AttributeError before the first fit."""
        if self._approx is None:
            raise AttributeError("There is no approximation yet: call fit first.")
        return self._approx

    def fit(
        self,
        n: int = 10_000,
        score: bool | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        backend: str | None = None,
        include_transformed: bool = False,
        compile_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> NGVIApproximation:
        """Fit the approximation.

        Parameters
        ----------
        n : int, default 10_000
            The most iterations; the fit stops earlier by itself. 0 returns the starting approximation.
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
        refuse_unknown(kwargs, NGVI.__init__, NGVI.fit)
        n = check_n(n)
        self._callbacks = list(callbacks or [])
        self._score = score is None or bool(score)
        clock = time.perf_counter()
        choice = self._options.choice
        family = AXES["family"][choice.family]
        with FitProgress(progressbar, progressbar_theme) as progress:
            density = LogDensity(self._given["model"], backend or "auto", compile_kwargs)
            check_memory(family.memory_bytes(density.n_dim), choice.family, density.n_dim, list(AXES["family"]))
            (seed,) = _get_seeds_per_chain(self._given["random_seed"], 1)
            self._density, self._seed = density, int(seed)
            with _blas_threads(density):
                rule = self._rule()
                point = starting.start_point(density, self._given["start"])
                scales = starting.start_scales(density, self._given["start_sigma"])
                q = starting.choose_start(rule, family, point, scales, density)
                self._loop_state = loop.start(rule, q)
                self._approx = NGVIApproximation(
                    density, q, random_seed=self._seed, include_transformed=include_transformed
                )
                self._approx._inference = self
                self._seconds = time.perf_counter() - clock
                self._run(rule, n, progress)
        return self._finish()

    def refine(
        self,
        n: int,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> NGVIApproximation:
        """Go on for up to ``n`` more iterations, from where the fit ended.

        Parameters
        ----------
        n : int
        progressbar : bool, default True
        progressbar_theme : rich.theme.Theme, optional
        tol, max_draws : optional
            New values of these options; a fit that has converged goes on only with a smaller ``tol``.

        Returns
        -------
        NGVIApproximation
            The same object as before, changed in place.
        """
        if self._loop_state is None:
            raise TypeError("There is nothing to refine: call fit first.")
        n = check_n(n)
        if tol is not None or max_draws is not None:
            o = self._options
            self._options = FitOptions.validated(
                **vars(o.choice),
                tol=o.tol if tol is None else tol,
                n_draws=o.n_draws,
                max_draws=o.max_draws if max_draws is None else max_draws,
            )
        rule = self._rule()
        self._loop_state = loop.reopen(rule, self._loop_state)
        with FitProgress(progressbar, progressbar_theme) as progress, _blas_threads(self._density):
            self._run(rule, n, progress)
        return self._finish()

    def run_profiling(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: there is no compiled step function to profile."""
        raise NotImplementedError(
            "NGVI has no compiled step function to profile. Profile the call of fit with any Python profiler; "
            "approx.compile_seconds and approx.run_seconds say where the time went."
        )

    def _rule(self) -> Any:
        o = self._options
        return AXES["step"][o.choice.step](
            self._density,
            AXES["update"][o.choice.update],
            AXES["estimator"][o.choice.estimator],
            seed=self._seed,
            tol=o.tol,
            n_draws=o.n_draws,
            max_draws=o.max_draws,
        )

    def _run(self, rule: Any, n: int, progress: FitProgress) -> None:
        clock = time.perf_counter()

        def observe(state: loop.LoopState) -> None:
            self._loop_state = state
            progress.update(state)
            if self._callbacks:
                self._approx.set_state(state.rule.q)  # type: ignore[union-attr]
                losses = state.losses if self._score else None
                for callback in self._callbacks:
                    callback(self._approx, losses, state.n_iterations)

        assert self._loop_state is not None
        self._loop_state = loop.run(rule, self._loop_state, n, observe)
        self._elbo, self._gap = _assess(rule, self._loop_state)
        progress.update(self._loop_state, last=True)
        self._seconds += time.perf_counter() - clock

    def _finish(self) -> NGVIApproximation:
        """Bring the approximation up to date, say how it went, and return it."""
        state, approx, density, choice = self._loop_state, self.approx, self._density, self._options.choice
        assert state is not None
        approx.set_state(state.rule.q)
        approx.record = FitRecord(
            status=state.status,
            elbo=self._elbo,
            gap=self._gap,
            n_iterations=state.n_iterations,
            n_gradients=density.n_gradients,
            n_hessians=density.n_hessians,
            n_dropped=state.rule.n_dropped,
            compile_seconds=density.compile_seconds,
            run_seconds=max(self._seconds - density.compile_seconds, 0.0),
            backend=density.backend,
            **vars(choice),
        )
        self.hist = approx.hist = state.losses.copy() if self._score else np.empty(0)
        approx.gap_hist = state.gaps.copy()
        logger.info(approx.record.closing_line())
        if state.rule.n_dropped:
            logger.info(
                f"{state.rule.n_dropped} draws were left out because log p or its gradient was not finite there."
            )
        if state.status in (Status.NOISE_LIMITED, Status.STALLED, Status.MAX_ITERATIONS):
            warnings.warn(
                f"The fit did not converge ({state.status}). {state.status.sentence} {state.status.cure}",
                ConvergenceWarning,
                stacklevel=_stack_level(),
            )
        elif state.status is not Status.CONVERGED:
            logger.info(f"{state.status.sentence} {state.status.cure}")
        return approx


def fit_ngvi(n: int = 10_000, *, model: pm.Model | None = None, **options: Any) -> NGVIApproximation:
    """Fit a model by natural-gradient variational inference, without going through ``pm.fit``.

    Parameters
    ----------
    n : int, default 10_000
        The most iterations.
    model : pymc.Model, optional
    **options
        Of `NGVI` and of `NGVI.fit`.

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
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> approx.converged
    True
    """
    refuse_unknown(options, NGVI.__init__, NGVI.fit)
    of_fit = set(NGVI.fit.__annotations__) & set(options)
    inference = NGVI(model, **{k: v for k, v in options.items() if k not in of_fit})
    return inference.fit(n, **{k: options[k] for k in of_fit})


def _assess(rule: Any, state: loop.LoopState) -> tuple[Elbo, float]:
    """Return the ELBO and the gap on draws that had no part in reaching the state."""
    theta, logp, pairs, gap = rule.assess(state.rule)
    h: Array = logp - state.rule.q.log_density(theta)
    keep = np.isfinite(h)
    if not keep.any():
        return Elbo(-np.inf, np.inf), gap
    # The two draws of an antithetic pair are dependent: the error is that of the mean over pairs.
    both = keep[pairs[:, 0]] & keep[pairs[:, 1]]
    means = h[pairs[both]].mean(axis=1)
    se = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.inf
    return Elbo(float(h[keep].mean()), se), gap


def _blas_threads(density: LogDensity) -> AbstractContextManager[Any]:
    """Keep BLAS to one thread for small models: waking others takes longer than the work, above all on a busy machine."""
    return threadpool_limits(1, user_api="blas") if density.is_small else nullcontext()


def _stack_level() -> int:
    """Return the stack level of the first caller outside this package and PyMC's variational module."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("pymc_ngvi", "pymc.variational")):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level
