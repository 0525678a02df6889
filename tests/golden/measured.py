"""What is recorded of a model, and of a fit: nothing that depends on the order of predictors or of kinds of rows."""

import re

import numpy as np

from pymc_ngvi.families.sparse import find_blocks

#: Digits of a standard deviation to which moments are written.
DIGITS = 5


# --- models -----------------------------------------------------------------------------------------------------------


def structure_of(density):
    """Return what is found of a log density: kinds of rows, and the pattern of the Hessian."""
    rows, pattern = density.by_rows.found, density.pattern
    found = {"n_dim": density.n_dim, "rows": None, "pattern": None}
    if rows is None:
        found["why no rows"] = without_figures(density.by_rows.why_not)
    else:
        found["rows"] = sorted(map(_kind, rows.functions))
        found["n linear"] = int(np.count_nonzero(_slope_of_theta(rows)))
    if pattern is not None:
        arrow = find_blocks(pattern)
        blocks = None if arrow is None else [len(arrow.sizes), len(arrow.border)]
        found["pattern"] = {"n entries": pattern.n_entries, "blocks and border": blocks}
    if density.summed is not None:
        found["sums"] = [len(density.summed.weights), density.summed.pattern.n_entries]
    return found


def _kind(function):
    """Return rows, predictors, directions, and pairs of predictors that interact."""
    return [len(function.index), function.k, function.n_directions, int(np.tril(function.interacts).sum())]


def _slope_of_theta(rows):
    return rows.linear_map.transposed_times(rows.terms.slope[None])[0]


# --- fits -------------------------------------------------------------------------------------------------------------


def fit_of(approx, *, is_short=False):
    """Return the outcome of a fit.

    Parameters
    ----------
    is_short : bool
        Of some iterations only, whose draws are the same as long as the seed is: it may not move at all.
    """
    record = approx.record
    within = 0.0 if is_short or record.estimator == "quadrature" else float(record.elbo.se)
    error = 0.0 if is_short else _error(approx)
    return {
        "choice": [record.family, record.update, record.estimator, record.step, record.reparam],
        "status": record.status.name,
        "posterior": "exact" if record.is_exact else "nested" if record.is_nested else "gaussian",
        "why": without_figures(record.posterior),
        "reason": str(record.reason),
        "why this family": without_figures(record.family_reason),
        "n modes": len(record.modes),
        "improper": list(record.improper),
        "elbo": float(record.elbo.value),
        "elbo within": within,
        **moments(approx.mean_flat, approx.sd_flat),
        "error": round(error, 5),
    }


def _error(approx):
    """Return the Monte Carlo error of a moment, in standard deviations."""
    record = approx.record
    if record.is_pool:
        return 1.0 / np.sqrt(approx._state.checks.effective_size)
    if record.estimator == "quadrature":
        return 0.0
    # Gaussians that are so many nats apart: spread evenly over the coordinates.
    return float(np.sqrt(2.0 * max(record.gap, 0.0) / len(approx.mean_flat))) if np.isfinite(record.gap) else 0.0


def moments(mean, sd):
    """Return means and standard deviations, to `DIGITS` of the latter."""
    mean, sd = np.asarray(mean, dtype=float).ravel(), np.asarray(sd, dtype=float).ravel()
    with np.errstate(all="ignore"):
        places = np.where(np.isfinite(sd) & (sd > 0.0), DIGITS - 1 - np.floor(np.log10(sd)), 9).astype(int)
    return {
        "mean": [round(float(m), int(p)) for m, p in zip(mean, places, strict=True)],
        "sd": [round(float(s), int(p)) for s, p in zip(sd, places, strict=True)],
    }


def arrays_of(**arrays):
    """Return numbers that are to stay, as they are."""
    return {name: [float(f"{x:.9g}") for x in np.ravel(values)] for name, values in arrays.items()}


def without_figures(sentence):
    """Return a sentence with its figures left out, which may differ by rounding."""
    return re.sub(r"\d[\d,.]*", "#", sentence)
