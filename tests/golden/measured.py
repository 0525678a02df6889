"""What is recorded of a model, and of a fit.

Nothing here depends on the order of predictors or of kinds of rows: a kind is known by its numbers, and derivatives are
along a direction of all coordinates.
"""

import re

import numpy as np

from pymc_ngvi.families import DiagonalState
from pymc_ngvi.families.sparse import find_blocks
from pymc_ngvi.rows.expectation import derivatives, one_finer, roots

#: How far points are from the start, and the standard deviations of the Gaussian about them.
AROUND, SD = 0.3, 0.2
#: Relative error of a number of the engines, of what it is a sum of; times what rounding of the point makes.
RELATIVE, OF_ROUNDING = 1e-13, 4.0
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


def engine_of(density, *, derived=False):
    """Return the numbers of each kind of rows near the start, each with how far it may move.

    Parameters
    ----------
    derived : bool
        Whether log p with its gradient, and second derivatives of rows, are compiled in their place.
    """
    rows = density.by_rows.found
    if rows is None:
        return []
    rng = np.random.default_rng(1)
    point = density.initial_point() + AROUND * rng.standard_normal(density.n_dim)
    along = rng.standard_normal(density.n_dim) / np.sqrt(density.n_dim)
    measure = _whole(density) if derived else _kinds
    with np.errstate(all="ignore"):
        now, scale = measure(rows, point, along)
        moved, _ = measure(rows, point * (1.0 + 2.0**-51) + 2.0**-52, along)
    found = []
    for (kind, values), (_, others), sizes in zip(now, moved, scale, strict=True):
        within = [max(RELATIVE * s, OF_ROUNDING * abs(a - b)) for s, a, b in zip(sizes, values, others, strict=True)]
        found.append([kind, [float(v) for v in values], [float(f"{w:.2g}") for w in within]])
    return sorted(found, key=lambda part: (part[0], part[1]))


def _kinds(rows, point, along):
    """Return, for each kind of rows, its value at a point, and expectations about it by two rules, with their sizes."""
    [eta], moved = rows.linear_map(point[None]), rows.linear_map.times(along[None])[0]
    seen = rows.seen(DiagonalState.from_scale(point, np.full(len(point), SD)))
    covariances, found, sizes = iter(seen.covariances), [], []
    for function in rows.functions:
        k, n = function.k, len(function.index)
        cov = np.empty((n, k, k))
        for a, b in zip(*np.tril_indices(k), strict=True):
            cov[:, a, b] = cov[:, b, a] = next(covariances)
        root, direction = roots(cov), moved[function.index]
        values = function.values([column[None] for column in eta[function.index].T], slice(None))[0]
        size = np.abs(values).sum()
        per_sd = _in_sds(root, direction)
        numbers, scales = [values.sum()], [size]
        for level in range(min(2, *function.n_levels)):
            code = sum(level * one_finer(block) for block in range(len(function.blocks)))
            codes = np.full(n, code, dtype=np.int16)
            whitened = function.whitened(eta[function.index], root, codes, np.arange(n))
            grad, hessian = derivatives(whitened, root)
            hessian[:, ~function.interacts] = 0.0
            numbers += [whitened[0].sum(), np.sum(grad * direction)]
            numbers += [np.einsum("ra,rab,rb->", direction, hessian, direction)]
            here = np.abs(whitened[0]) + np.abs(values)
            scales += [here.sum(), here @ per_sd, here @ per_sd**2]
        found.append((_kind(function), numbers))
        sizes.append(scales)
    return found, sizes


def _in_sds(root, direction):
    """Return how long a direction is in standard deviations of the predictors, (n_rows,)."""
    k = root.shape[1]
    inverse = np.linalg.pinv(root) if k > 1 else 1.0 / np.where(root > 0.0, root, np.inf)
    return np.linalg.norm(np.einsum("rab,rb->ra", inverse, direction), axis=1)


def _whole(density):
    """Return what measures log p, its gradient, and its Hessian, by rows where these serve."""

    def measure(rows, point, along):
        [eta] = rows.linear_map(point[None])
        logp, grad = density.logp_grad(point[None])
        product, size = density.mean_hessian(point[None]).products(along[None])[0], _size(rows, eta)
        numbers = [float(logp[0]), float(grad[0] @ along), float(along @ product)]
        return [([0], numbers)], [
            [size, float(np.abs(grad[0]) @ np.abs(along)) + size, float(np.abs(along) @ abs(product))]
        ]

    return measure


def _size(rows, eta):
    """Return what log p is a sum of, in absolute values."""
    size = abs(rows.constant) + float(np.abs(eta) @ np.abs(rows.terms.slope))
    for function in rows.functions:
        values = function.values([column[None] for column in eta[function.index].T], slice(None))
        size += float(np.abs(values).sum())
    return size


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
