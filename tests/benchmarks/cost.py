"""What one iteration costs apart from the model, beside the linear algebra that it can't do without.

Two cases: an update with dense moments given, in units of matrix products and Cholesky factorisations; and one whole
iteration of a step rule with one draw and gradients alone, in units of passes over a matrix. The units are measured in
the same minutes. Times are CPU times of this process with one BLAS thread, medians of repeated timings: others on the
machine make them longer by sharing caches, but not by taking turns. From a checkout that is not installed, set
``PYTHONPATH`` to its root.

Examples
--------
::

    python cost.py --out cost.csv --table cost_tables.md
"""

import argparse
import datetime
import os
import time

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from environment import describe_environment
from records import Records, Row
from threadpoolctl import threadpool_limits

from pymc_ngvi.core.types import Array
from pymc_ngvi.families import FAMILIES, BlockFamily, BlockStructure, FullPrecisionState
from pymc_ngvi.methods import DIRECTIONS, STEPS, UPDATES
from pymc_ngvi.methods.cholesky import plus
from pymc_ngvi.methods.estimators import ESTIMATORS, Moments

DIMENSIONS = (10, 100, 500, 1_000)
BLOCK = 10
STEP_SIZE = 0.1
#: Most times what it needs that an iteration may take, from `LEAST_DIM` dimensions on; below, calls cost more than
#: arithmetic.
MOST_RATIO, LEAST_DIM = 3.0, 100
#: CPU seconds for which each function is timed, and those of one timing at least.
BUDGET, LEAST = 0.25, 0.002

FIELDS = (
    "case",
    "family",
    "update",
    "step",
    "n_dim",
    "microseconds",
    "needs",
    "needed_microseconds",
    "ratio",
    "product",
    "cholesky",
    "pass",
    "running_sum",
    "repeats",
    "load",
    "date",
    "environment",
)


@dataclass(frozen=True)
class Needs:
    """What an iteration can't do without: numbers of matrix products, Cholesky factorisations, and so on.

    A triangular solve with as many right-hand sides as dimensions counts as a matrix product. A pass reads two matrices
    and writes a third. A running sum goes along every row of a matrix: each sum waits for the one before.
    """

    products: float = 0.0
    choleskys: float = 0.0
    running_sums: float = 0.0
    passes: float = 0.0

    def microseconds(self, units: dict[str, float]) -> float:
        """Return what these take."""
        counts = {
            "product": self.products,
            "cholesky": self.choleskys,
            "running_sum": self.running_sums,
            "pass": self.passes,
        }
        return sum(count * units[name] for name, count in counts.items())

    def __str__(self) -> str:
        counts = (self.products, self.choleskys, self.running_sums, self.passes)
        names = ("product", "Cholesky", "running sum", "pass")
        several = ("products", "Cholesky", "running sums", "passes")
        parts = zip(counts, names, several, strict=True)
        return " + ".join(f"{count:.2g} {one if count == 1 else more}" for count, one, more in parts if count)


#: With moments given. natural: Cholesky of M, triangular solve with the factor; natural_pd squares a matrix before.
WITH_MOMENTS = {
    "natural": Needs(products=1, choleskys=1),
    "natural_pd": Needs(products=2, choleskys=1),
    "cholesky": Needs(products=1),
    "cholesky_precision": Needs(products=1),
    "sqrt": Needs(products=1),
    "euclidean": Needs(products=1),
}
#: With gradients of one draw: matrices that must be read or written, in thirds of a pass. All read the factor for the
#: draw and for whitening (2), and read factor and direction and write the factor (3). The direction takes one running
#: sum through the factor, or is an outer product (reads the factor and writes, 2). snngm reads the direction for its
#: norm (1), and reads it and the momentum and writes the momentum (3). adam has two such averages (6), and reads both
#: and writes the step (3).
ALWAYS, OUTER, NORM, AVERAGE, SCALED = 5 / 3, 2 / 3, 1 / 3, 1.0, 1.0
_NATURAL = {
    "snngm": Needs(running_sums=1, passes=ALWAYS + NORM + AVERAGE),
    "adam": Needs(running_sums=1, passes=ALWAYS + 2 * AVERAGE + SCALED),
    "constant": Needs(running_sums=1, passes=ALWAYS),
}
_EUCLIDEAN = {
    "adam": Needs(passes=ALWAYS + OUTER + 2 * AVERAGE + SCALED),
    "sgd": Needs(passes=ALWAYS + OUTER),
}
GRADIENTS_ONLY: tuple[tuple[str, str, str, Needs], ...] = (
    ("full", "cholesky", "snngm", _NATURAL["snngm"]),
    ("full", "cholesky", "adam", _NATURAL["adam"]),
    ("full", "cholesky", "constant", _NATURAL["constant"]),
    ("full precision", "cholesky_precision", "snngm", _NATURAL["snngm"]),
    ("full precision", "cholesky_precision", "adam", _NATURAL["adam"]),
    ("full", "sqrt", "constant", _NATURAL["constant"]),
    ("full", "euclidean", "adam", _EUCLIDEAN["adam"]),
    ("full precision", "euclidean", "adam", _EUCLIDEAN["adam"]),
    ("full", "euclidean", "sgd", _EUCLIDEAN["sgd"]),
)
FAMILIES_OF = {
    "natural": ("full", "block", "diagonal"),
    "natural_pd": ("full", "block", "diagonal"),
    "cholesky": ("full", "block", "diagonal"),
    "cholesky_precision": ("full precision",),
    "sqrt": ("full", "block", "diagonal"),
    "euclidean": ("full", "full precision", "block", "diagonal"),
}


class Free:
    """A target that costs nothing: gradients made in advance."""

    has_hessian = has_minibatch = False

    def __init__(self, n_dim: int) -> None:
        self.n_dim = n_dim
        self.n_gradients = self.n_hessians = 0
        self._grads = np.random.default_rng(n_dim).standard_normal((64, n_dim))

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return zeros, and gradients that have nothing to do with ``theta``."""
        return np.zeros(len(theta)), self._grads[: len(theta)]

    def next_batch(self, rng: np.random.Generator) -> None:
        """Do nothing."""


def make_family(name: str, n_dim: int) -> Any:
    """Return what makes states."""
    if name == "block":
        return BlockFamily(BlockStructure(np.arange(n_dim) // BLOCK))
    return FullPrecisionState if name == "full precision" else FAMILIES[name]()


def make_state(family: str, n_dim: int, rng: np.random.Generator) -> Any:
    """Return a state of the family with a factor without zeros."""
    state = make_family(family, n_dim).from_scale(np.zeros(n_dim), np.ones(n_dim))
    if family != "diagonal":
        noise = np.tril(rng.standard_normal((n_dim, n_dim))) / np.sqrt(n_dim)
        if family == "block":
            noise = np.concatenate(
                [part.ravel() for part in np.tril(rng.standard_normal((n_dim // BLOCK, BLOCK, BLOCK)))]
            )
            noise[state.structure.diagonal] = 0.0
        state = plus(state, np.zeros(n_dim), 0.1 * (np.tril(noise, -1) if noise.ndim == 2 else noise))
    return state


def make_moments(state: Any, rng: np.random.Generator) -> Moments:
    """Return dense moments, not far from those of an optimum."""
    n_dim = state.n_dim
    noise = rng.standard_normal((4 * n_dim, n_dim))
    outer = state.outer(noise, noise)
    curvature = state.outer_mean(outer)
    unknown = np.full(n_dim, np.inf)
    return Moments(rng.standard_normal(n_dim), curvature, unknown, unknown, gap=np.nan, floor=np.inf, floor_sd=np.inf)


def make_units(family: str, n_dim: int, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return the functions that the needs are counted in, in the form of the family."""
    shape = {"block": (max(n_dim // BLOCK, 1), min(BLOCK, n_dim), min(BLOCK, n_dim)), "diagonal": (n_dim,)}.get(
        family, (n_dim, n_dim)
    )
    a, b = rng.standard_normal(shape), rng.standard_normal(shape)
    passes = {"pass": lambda: a + b, "running_sum": lambda: np.cumsum(a, axis=-1)}
    if family == "diagonal":
        return {"product": lambda: a * b, "cholesky": lambda: np.sqrt(np.abs(a)), **passes}
    spd = a @ a.swapaxes(-1, -2) + 0.1 * shape[-1] * np.eye(shape[-1])
    return {"product": lambda: a @ b, "cholesky": lambda: np.linalg.cholesky(spd), **passes}


def measured(functions: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], int]:
    """Return microseconds of CPU time for each function: the median of timings that take turns; and how many."""
    numbers, most = {}, 0.0
    for name, function in functions.items():
        function()
        taken = _taken(function, 1)
        numbers[name] = max(1, int(LEAST / max(taken, 1e-7)))
        most = max(most, taken * numbers[name])
    rounds = int(np.clip(BUDGET / max(most, LEAST), 7, 101))
    timings: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            timings[name].append(_taken(function, numbers[name]) / numbers[name])
    return {name: 1e6 * float(np.median(values)) for name, values in timings.items()}, rounds


def _taken(function: Callable[[], Any], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        function()
    return time.process_time() - start


def cases(n_dim: int) -> Iterator[tuple[tuple[str, str, str, str], Needs, Callable[[], Any]]]:
    """Yield case, family, update and step rule; what it needs; and the function to time."""
    rng = np.random.default_rng(n_dim)
    for update, families in FAMILIES_OF.items():
        for family in families:
            state = make_state(family, n_dim, rng)
            moments = make_moments(state, rng)
            # The default arguments hold what the loop goes on to change.
            yield (
                ("moments", family, update, ""),
                WITH_MOMENTS[update],
                lambda update=update, state=state, moments=moments: UPDATES[update](state, moments, STEP_SIZE, True),
            )
    for family, update, step, needs in GRADIENTS_ONLY:
        rule = STEPS[step](
            Free(n_dim),
            UPDATES[update],
            ESTIMATORS["reparam"],
            direction=DIRECTIONS.get(update),
            seed=1,
            n_draws=1,
            step_size=1e-3,
        )
        start = rule.step(rule.init(make_state(family, n_dim, rng)))
        yield ("gradients", family, update, step), needs, lambda rule=rule, start=start: rule.step(start)


def run(records: Records, dimensions: Sequence[int]) -> None:
    """Time what is not in the results yet."""
    done = {tuple(row[key] for key in FIELDS[:5]) for row in records.read()}
    environment = describe_environment()
    for n_dim in dimensions:
        for key, needs, function in cases(n_dim):
            if (*key, str(n_dim)) in done:
                continue
            units = make_units(key[1], n_dim, np.random.default_rng(1))
            assert function() is not None  # a step that is refused would be cheap
            times, repeats = measured({"iteration": function, **units})
            needed = needs.microseconds(times)
            row = dict(zip(FIELDS, (*key, n_dim, times["iteration"], str(needs), needed), strict=False))
            row |= {"ratio": times["iteration"] / needed, "repeats": repeats, "load": os.getloadavg()[0]}
            row |= {name: times[name] for name in units} | {"environment": environment}
            row["date"] = datetime.datetime.now().isoformat(timespec="seconds")
            records.append(row)
            print(*key, n_dim, f"{times['iteration']:.1f} us, {row['ratio']:.2f} x ({needs})", flush=True)


def write_tables(rows: list[Row]) -> str:
    """Return a table for each case."""
    parts = []
    for case in ("moments", "gradients"):
        chosen = [row for row in rows if row["case"] == case]
        dimensions = sorted({int(row["n_dim"]) for row in chosen})
        head = " | ".join(f"d = {d:,}" for d in dimensions)
        extra = " | growth 100 to 1,000 | growth 500 to 1,000" if case == "gradients" else ""
        n_columns = 3 + len(dimensions) + (2 if extra else 0)
        parts += [f"| update | family | needs | {head}{extra} |", "|---" * n_columns + "|"]
        for key in dict.fromkeys((row["update"], row["step"], row["family"]) for row in chosen):
            mine = {int(r["n_dim"]): r for r in chosen if (r["update"], r["step"], r["family"]) == key}
            cells = [_cell(mine[d]) for d in dimensions]
            name = f"`{key[0]}`" + (f", `{key[1]}`" if key[1] else "")
            if extra:
                cells += [_growth(mine, 100, 1_000), _growth(mine, 500, 1_000)]
            needs = "-" if key[2] == "diagonal" else mine[dimensions[0]]["needs"]
            parts.append(f"| {name} | {key[2]} | {needs} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(row: Row) -> str:
    taken = float(row["microseconds"])
    text = f"{taken / 1e3:.3g} ms" if taken >= 1e3 else f"{taken:.0f} µs"
    if row["family"] == "diagonal":  # a few calls on vectors: there is nothing to divide by
        return text
    ratio = float(row["ratio"])
    mark = "**" if ratio > MOST_RATIO and int(row["n_dim"]) >= LEAST_DIM else ""
    return f"{text}, {mark}{ratio:.1f}x{mark}"


def _growth(rows: dict[int, Row], low: int, high: int) -> str:
    """Return the exponent of the dimension."""
    if low not in rows or high not in rows:
        return "-"
    ratio = float(rows[high]["microseconds"]) / float(rows[low]["microseconds"])
    return f"{np.log(ratio) / np.log(high / low):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Time what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cost.csv"))
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--dimensions", type=int, nargs="+", default=DIMENSIONS, help="multiples of 10")
    options = parser.parse_args(arguments)
    records = Records(options.out, FIELDS)
    with threadpool_limits(1, user_api="blas"):
        run(records, options.dimensions)
    if options.table:
        options.table.write_text(write_tables(records.read()))


if __name__ == "__main__":
    main()
