"""One fit through the front door, timed: what the scripts on hierarchical models have in common."""

import os
import time
import warnings

from typing import Any

import numpy as np
import pymc as pm

from isolated import first_line, peak_memory

#: Columns of the results that `timed_fit` fills.
FIT_FIELDS = (
    "status", "chosen", "n_dim", "n_iterations", "n_gradients", "n_hessians", "gap", "seconds", "cpu_seconds",
    "compile_seconds", "memory_before", "memory", "load",
)  # fmt: skip


def refusal(model: pm.Model, options: dict[str, Any]) -> str | None:
    """Return why the package does not take options, as one line; None where it does."""
    import pymc_ngvi

    try:
        pymc_ngvi.NGVI(model, **_of_constructor(options))
    except (TypeError, ValueError) as error:
        return first_line(error)
    return None


def timed_fit(model: pm.Model, options: dict[str, Any], seed: int) -> tuple[Any, dict[str, object]]:
    """Fit a model and return the approximation and the columns `FIT_FIELDS`.

    Parameters
    ----------
    model : pymc.Model
    options : dict
        Of ``pm.fit(method="ngvi")``.
    seed : int

    Notes
    -----
    Memory is the largest resident memory of this process, in MiB, before and after. The approximation is None where
    the fit failed; ``status`` says why.
    """
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    columns: dict[str, object] = {"memory_before": peak_memory(), "load": os.getloadavg()[0]}
    start, cpu_start = time.perf_counter(), time.process_time()
    try:
        with model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the status is in the row
            approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **options)
    except Exception as error:
        return None, {**columns, "status": f"error: {first_line(error)}"}
    columns |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    record = approx.record
    counts = {name: getattr(record, name) for name in ("n_iterations", "n_gradients", "n_hessians")}
    return approx, {
        **columns,
        **counts,
        "memory": peak_memory(),
        "status": str(record.status),
        "chosen": f"{record.family}, {record.update}, {record.estimator}, {record.step}, {record.backend}",
        "n_dim": approx.layout.n_dim,
        "gap": None if np.isnan(record.gap) else float(record.gap),
        "compile_seconds": float(record.compile_seconds),
    }


def moments_of(approx: Any, names: list[str]) -> tuple[Any, Any]:
    """Return means and standard deviations, unconstrained, of the named variables, one after the other."""
    where = {v.name: v.where for v in approx.layout.variables}
    mean, sd = approx.mean_flat, approx.sd_flat
    return tuple(np.concatenate([moment[where[name]] for name in names]) for moment in (mean, sd))


def _of_constructor(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("n", "backend")}
