"""A picture of importance weights: how heavy their tail is."""

import numpy as np

from pymc_ngvi.core.psis import khat_limit, pareto_khat, tail_length, weigh
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.weights import weights_and_elbo
from pymc_ngvi.results.plotting.style import (
    FAINT,
    FONT_SIZE,
    LINE,
    OTHER,
    WARNING,
    Axes,
    need_matplotlib,
    trim,
    write_title,
)
from pymc_ngvi.results.posterior import Posterior

#: Points along a curve; weights that are drawn, of those that are not in the tail.
_N_POINTS = 200
#: Weights below this part of their mean are not shown.
_LEAST = 1e-3


def khat_title(posterior: Posterior) -> str | None:
    """Return the title of `plot_khat` for weights that are kept; None, for its own title, where there are none."""
    if (kept := posterior.distribution.kept_log_weights()) is None:
        return None
    found = weights_and_elbo(kept)[0]
    return (
        f"Weights of the pool of global parameters that this posterior is drawn from: Pareto k-hat "
        f"{found.khat_text()}, {found.n_draws:,} draws with an effective sample size of {found.effective:,.0f}"
    )


def plot_khat(log_p: Array, log_q: Array, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot how many importance weights p/q are larger than a given one, and the Pareto tail that k-hat is fitted to.

    Both axes are logarithmic. The tail is that of Pareto-smoothed importance sampling; beside it are the tails that k
    at the limit of use, and at 1, where the weights have no mean, would have. Points below the first: q can be used.

    Parameters
    ----------
    log_p, log_q : ndarray, shape (n_draws,)
        Log densities at the same draws of q, on the unconstrained scale; constants do not matter.
    title : str, optional
        Default: what the weights say of q.
    ax : matplotlib.axes.Axes, optional
        To draw into; by default a figure is made.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.
    ValueError
        For fewer than 100 draws.

    References
    ----------
    .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
       https://doi.org/10.48550/arXiv.1507.02646

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).standard_t(5, size=2_000)
    >>> ax = plot_khat(log_p=-0.5 * x**2, log_q=-3.0 * np.log1p(x**2 / 5))
    >>> ax.get_xscale(), ax.get_yscale()
    ('log', 'log')
    """
    pyplot = need_matplotlib("plot_khat")
    khat = pareto_khat(log_p, log_q)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6.5, 4.0), layout="constrained")
    n = len(log_p)
    weights = _weights(log_p, log_q)
    shown = np.sort(weights[weights >= _LEAST])[::-1]
    share = np.arange(1, len(shown) + 1) / n
    n_tail = min(tail_length(n), len(shown))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.plot(shown[n_tail - 1 :], share[n_tail - 1 :], color=LINE, linewidth=1.2)
    ax.plot(shown[:n_tail], share[:n_tail], "o", color=LINE, markersize=2.5, label=f"weights; dots: tail of {n_tail:,}")
    if n_tail < len(shown) and np.median(shown[:n_tail]) > shown[n_tail]:
        _draw_tails(ax, shown[: n_tail + 1], n, khat)
    ax.set_ylim(0.5 / n, 3.0)
    _label_weights(ax)
    ax.set_xlabel("weight p/q, relative to the mean")
    ax.set_ylabel("share of the draws with a larger weight")
    note = f"largest weight: {weights.max() / weights.sum():.2g} of their sum"
    ax.annotate(note, (0.02, 0.03), xycoords="axes fraction", fontsize=FONT_SIZE, color=FAINT)
    ax.legend(fontsize=FONT_SIZE, frameon=False, loc="upper right")
    trim(ax)
    write_title(ax, weigh(log_p, log_q)[1].sentence() if title is None else title)
    return ax


def _label_weights(ax: Axes) -> None:
    """Widen the axis of weights that hardly differ, and write round numbers along it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    left, right = ax.get_xlim()
    left, right = min(left, 0.3), max(right, 3.0)
    ax.set_xlim(left, right)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if right > 300.0 * left else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _weights(log_p: Array, log_q: Array) -> Array:
    """Return the weights over their mean, (n_draws,); 0 where log p is not finite."""
    log_ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
    top = log_ratio.max()
    # Where the largest is infinite, it has all of the weight.
    weights = (log_ratio == top).astype(np.float64) if np.isinf(top) else np.exp(log_ratio - top)
    return weights / weights.mean()


def _draw_tails(ax: Axes, tail: Array, n: int, khat: float) -> None:
    """Draw Pareto tails that begin where the tail of the weights, from the largest, does."""
    start, excess = tail[-1], tail[:-1] - tail[-1]
    share = (len(tail) - 1) / n
    median = float(np.median(excess))
    right = start + np.geomspace(1e-2 * median, 4.0 * excess.max(), _N_POINTS)
    limit = khat_limit(n)
    kinds = [(limit, OTHER, "--", f"k = {limit:.2g}: limit of use"), (1.0, WARNING, ":", "k = 1: no mean")]
    if np.isfinite(khat):
        kinds.insert(0, (khat, "0.15", "-", f"k = {khat:.2f}: fitted"))
    for k, colour, style, label in kinds:
        survival = _survival(right - start, k, median)
        ax.plot(right, share * survival, color=colour, linestyle=style, linewidth=1.2, label=label)


def _survival(excess: Array, k: float, median: float) -> Array:
    """Return the part of a generalised Pareto distribution with a given median that is above each excess."""
    if abs(k) < 1e-6:
        return np.asarray(np.exp2(-excess / median))
    # Median: scale (2^k - 1) / k.
    base = 1.0 + np.expm1(k * np.log(2.0)) * excess / median
    return np.asarray(np.where(base > 0.0, np.maximum(base, 1e-300) ** (-1.0 / k), np.nan))
