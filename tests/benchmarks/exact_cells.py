"""What the benchmark of exact posteriors measures in one process: a fit and its errors, or another method and its own.

Started by ``exact.py``; prints what it finds as JSON, a line after each stage.
"""

import argparse
import resource
import time
import warnings

from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pymc as pm
import rivals

from isolated import first_line, peak_memory, report
from measure import Array, Reference
from models_glmm import random_intercept_logistic, simulate_logistic

from pymc_ngvi.core.importance import smoothed

N_DRAWS = 4_000
#: Nodes of the rule that log m is checked against; draws of the globals it is checked at.
MOST_NODES, N_CHECKED = 41, 250
#: Options of our own methods.
OURS: dict[str, dict[str, Any]] = {
    "exact": {},
    "gaussian": {"posterior": "gaussian"},
    "rvb2": {"reparam": "rvb2"},
    "psis": {"posterior": "gaussian"},
}


def main() -> None:
    """Measure one cell."""
    options = _parse_options()
    try:
        PARTS[options.part](options)
    except Exception as error:
        report(status=first_line(error))


# --- fits -------------------------------------------------------------------------------------------------------------


class Clock:
    """Processor seconds, of children too, and seconds, since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def read(self) -> tuple[float, float]:
        """Return processor seconds and seconds."""
        now = self._now()
        return now[0] - self._start[0], now[1] - self._start[1]

    @staticmethod
    def _now() -> tuple[float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime, time.perf_counter()


def fitted(model: pm.Model, seed: int, options: dict[str, Any]) -> tuple[Any, float, float]:
    """Return an approximation, and processor seconds and seconds of the whole call."""
    clock = Clock()
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status is in the row
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **options)
    return approx, *clock.read()


def outcome(approx: Any) -> dict[str, object]:
    """Return what a fit says of itself."""
    record = approx.record
    found = {"fit_status": str(record.status), "is_exact": int(record.is_exact), "verdict": record.posterior}
    return found | {"khat": float(approx.khat()), "ess": approx._state.effective_size if record.is_exact else None}


def errors(model: pm.Model, approx: Any, reference: Reference, seed: int) -> dict[str, object]:
    """Return errors of moments and of draws, of all coordinates and of the globals."""
    from pymc_ngvi.marginal.exact import forest_of

    names = measure.coordinate_names(model)
    clock = Clock()
    draws = approx.draw_flat(N_DRAWS, random_seed=seed)
    draw_cpu = clock.read()[0]
    of_draws = reference.errors(names, draws.mean(axis=0), draws.std(axis=0, ddof=1))
    mean, sd = approx.mean_flat, approx.sd_flat
    of_moments = reference.errors(names, mean, sd)
    columns = {"em": of_draws.em, "es": of_draws.es, "em_moments": of_moments.em, "es_moments": of_moments.es}
    return columns | worst(reference, names, mean, sd, forest_of(approx.density).globals_) | {"draw_cpu": draw_cpu}


def worst(reference: Reference, names: list[str], mean: Array, sd: Array, which: Array) -> dict[str, object]:
    """Return the worst errors of some coordinates, in mean and in standard deviation."""
    chosen = [names[i] for i in which]
    true_mean, true_sd = (np.array([of[name] for name in chosen]) for of in (reference.mean, reference.sd))
    of_mean, of_sd = (mean[which] - true_mean) / true_sd, sd[which] / true_sd - 1.0
    i, j = int(np.argmax(np.abs(of_mean))), int(np.argmax(np.abs(of_sd)))
    found = {"worst_mean": float(of_mean[i]), "worst_mean_name": chosen[i]}
    return found | {"worst_sd": float(of_sd[j]), "worst_sd_name": chosen[j]}


# --- parts ------------------------------------------------------------------------------------------------------------


def on_reference(options: argparse.Namespace) -> None:
    """One of our fits against the reference; of the exact one also again, and beside the Gaussian in this process."""
    model, reference = _reference(options)
    approx, cpu, seconds = fitted(model, options.seed, OURS[options.method])
    report(cold_cpu=cpu, seconds=seconds, memory=peak_memory())
    report(**outcome(approx))
    report(**errors(model, approx, reference, options.seed))
    if options.method == "exact":
        gaussian_cpu = fitted(model, options.seed, OURS["gaussian"])[1]
        report(gaussian_cpu=gaussian_cpu, warm_cpu=fitted(model, options.seed, {})[1])
    report(diagnosis=approx.diagnose().verdict)


def with_groups(options: argparse.Namespace) -> None:
    """One of our fits to simulated data of many groups; of the exact one log m against many more nodes."""
    n_groups = int(options.model.split()[0].replace(",", ""))
    model = random_intercept_logistic(simulate_logistic(n_groups, options.seed))
    report(memory_before=peak_memory())
    approx, cpu, seconds = fitted(model, options.seed, OURS[options.method])
    report(cold_cpu=cpu, seconds=seconds, memory=peak_memory())
    if options.method == "exact":
        report(**outcome(approx))
        if approx.record.is_exact and options.check:
            report(**against_many_nodes(approx._state, options.check))


def against_many_nodes(state: Any, n: int) -> dict[str, object]:
    """Return how far log m(g), and means of the globals, are from those of many nodes, on draws of the pool."""
    from pymc_ngvi.marginal.quadrature import PathRule, integrate

    pool, quadrature = state.pool, state.quadrature
    g, used = pool.g[:n], pool.log_marginal[:n]
    rule = PathRule(MOST_NODES, state.forest.n_levels)
    centres = quadrature.reference(g).centres
    truth = integrate(quadrature.terms, state.forest, rule, g, centres, moments=False).log_marginal
    apart = used - truth
    weights = [_normalised(log_m - pool.log_density[:n]) for log_m in (truth, used)]
    keep = weights[0] > 0.0
    mean = weights[0][keep] @ apart[keep]
    shift = np.abs(weights[1] @ g - weights[0] @ g) / state.sd()[state.forest.globals_]
    base = quadrature.base
    return {
        "log_m_error": float(np.sqrt(weights[0][keep] @ (apart[keep] - mean) ** 2)),
        "mean_shift": float(shift.max()),
        "nodes": f"{quadrature.rule.n_nodes}, {quadrature.rule.n_nodes if base is None else base.rule.n_nodes}",
    }


def by_rival(options: argparse.Namespace) -> None:
    """Another method, or another of our options, against the reference."""
    model, reference = _reference(options)
    if options.method not in OURS:
        rivals.import_method(options.method)
    clock = Clock()
    names = measure.coordinate_names(model)
    if options.method in OURS:
        mean, sd, columns = _ours(model, options, clock)
    else:
        found = rivals.RUNNERS[options.method](model, options.seed)
        cpu, seconds = clock.read()
        report(cold_cpu=cpu, seconds=seconds, memory=peak_memory())
        if not options.measure:
            return
        described = found.describe()
        order = [described.names.index(name) for name in names]
        mean, sd, columns = described.mean[order], described.sd[order], {"how": described.how}
        if options.method == "nutpie":
            columns["ess"] = _least_effective(found.posterior, reference, names)
    if not options.measure:
        return
    at = np.array([i for i, name in enumerate(names) if _is_global(name, names)])
    found_errors = reference.errors(names, mean, sd)
    report(em=found_errors.em, es=found_errors.es, **worst(reference, names, mean, sd, at), **columns)


def _ours(model: pm.Model, options: argparse.Namespace, clock: Clock) -> tuple[Array, Array, dict[str, object]]:
    """Return moments of 4,000 draws, with weights where these are asked for."""
    approx = fitted(model, options.seed, OURS[options.method])[0]
    draws = approx.draw_flat(N_DRAWS, random_seed=options.seed)
    weights, how = np.full(N_DRAWS, 1.0 / N_DRAWS), f"{N_DRAWS:,} draws"
    if options.method == "psis":  # as `corrected()` has them, also where it refuses
        log_weights, khat = smoothed(approx.log_p(draws) - approx.log_q(draws))
        weights, how = _normalised(log_weights), f"{how}, weighted (k-hat {khat:.2f})"
    cpu, seconds = clock.read()
    report(cold_cpu=cpu, seconds=seconds, memory=peak_memory())
    mean = weights @ draws
    return mean, np.sqrt(weights @ (draws - mean) ** 2), {"how": how, "khat": float(approx.khat())}


def _least_effective(posterior: Any, reference: Reference, names: list[str]) -> float:
    """Return the least bulk effective sample size of the globals, of two draws or more in each chain."""
    from arviz_stats import ess

    sizes = ess(posterior.to_dataset() if hasattr(posterior, "to_dataset") else posterior)
    wanted = {name.split("[")[0].removesuffix("_log__") for name in names if _is_global(name, names)}
    return float(min(np.min(sizes[name].to_numpy()) for name in wanted))


def _is_global(name: str, names: list[str]) -> bool:
    """Whether a coordinate is one of a variable with few elements."""
    variable = name.split("[")[0]
    return sum(other.split("[")[0] == variable for other in names) < 20


def _normalised(log_weights: Array) -> Array:
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _reference(options: argparse.Namespace) -> tuple[pm.Model, Reference]:
    model = getattr(measure.load_models(options.references), options.model)(options.data)
    return model, Reference.read(options.references / f"{options.model}.npz")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "references": on_reference,
    "groups": with_groups,
    "rivals": by_rival,
}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model")
    parser.add_argument("method")
    parser.add_argument("seed", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--references", type=Path)
    parser.add_argument("--check", type=int, default=N_CHECKED, help="draws at which log m is checked")
    parser.add_argument("--measure", action="store_true", help="measure the quality of a rival, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
