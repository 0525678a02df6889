"""Table 6 of Tan (2025) [1]_ again: three generalised linear mixed models, with and without reparametrised effects.

Beside the published rows of stochastic gradients stand ours of the same methods, and those of our own step rule. Each
fit runs in a process of its own: the first seed with an empty compile cache (cold), then all seeds with the cache that
this has left (warm). A run can be stopped and resumed: rows that are in the results file already are not run again.
Methods that the package does not have are skipped, with the reason in their row. With ``--once`` a row is one process
for each seed, for what takes hours, and keeps the way of the ELBO for the figure (figure 4 of the paper).
From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python glmm.py --data DATA
    python glmm.py --data DATA --models epilepsy --kinds default --groups 10 --out small.csv --table small.md
    python glmm.py --data DATA --once --seeds 1 --kinds gva-euclidean-adam rvb1-euclidean-adam
    python glmm.py --seeds 0

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

import argparse
import datetime
import tempfile

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import models_glmm
import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from pages import column_of, measured_on, median, significant, table, write_between_marks
from records import FIGURES, RESULTS, Records, Row
from timed_fit import FIT_FIELDS, refusal, timed_fit

mpl.use("Agg")
import matplotlib.pyplot as plt

MODELS = tuple(models_glmm.TABLE_6)
TITLES = {
    "epilepsy": "Epilepsy, Poisson, 59 patients, two effects each",
    "toenail": "Toenail, logistic, 294 patients",
    "hers": "HERS, logistic, 2,031 women",
}
LHAT_DRAWS = 1_000  # as in the paper
ELBO_DRAWS = 20_000
LHAT_SEED, ELBO_SEED = 100_000, 500_000
CHUNK_ELEMENTS = 4_000_000
MOST_ITERATIONS = 100_000
PATH_WINDOW = 250  # iterations over which the figure averages log p - log q


class Published(NamedTuple):
    """A cell of table 6: thousands of iterations, estimated ELBO, seconds (Julia, Xeon Gold 5222)."""

    thousands: int
    lhat: float
    seconds: float


@dataclass(frozen=True)
class Kind:
    """A row of the table: its name, our options for it, and what was published for each model.

    ``as_published``: with the settings and the start of the paper, which depend on the model.
    """

    label: str
    options: dict[str, Any]
    as_published: bool = False
    published: dict[str, Published] = field(default_factory=dict)

    def options_for(self, glmm: models_glmm.Glmm) -> dict[str, Any]:
        """Return the options of ``pm.fit`` for a model."""
        if not self.as_published:
            return self.options
        options = {
            "n": MOST_ITERATIONS, "estimator": "pathwise", "n_draws": 1, "base_draws": "plain", "window": 1_000,
            "start_sigma": 0.1, **self.options,
        }  # fmt: skip
        if options["family"] == "block":
            options |= {"blocks": glmm.blocks(), "start_sigma": glmm.start_sigma(effects=1.0, others=0.1)}
        if options["step"] == "adam":
            options["step_size"] = 0.001
        return options


def _rows(label: str, family: str, reparam: str | None, cells: dict[str, tuple]) -> dict[str, Kind]:
    """Return the three published rows of a parametrisation, from the thrice three cells of each."""
    name = reparam or "gva"
    natural = "cholesky" if reparam else "cholesky_precision"
    euclidean = {"update": "euclidean"} | ({} if reparam else {"factor": "precision"})
    steps = {
        "euclidean-adam": ("Euclidean, Adam", euclidean | {"step": "adam"}),
        "natural-adam": ("natural, Adam", {"update": natural, "step": "adam"}),
        "natural-snngm": ("natural, SNNGM", {"update": natural, "step": "snngm"}),
    }
    common = {"family": family} | ({"reparam": reparam} if reparam else {})
    return {
        f"{name}-{key}": Kind(
            f"{label}, {step}",
            common | options,
            as_published=True,
            published={model: Published(*cell) for model, cell in zip(MODELS, cells[key], strict=True)},
        )
        for key, (step, options) in steps.items()
    }


KINDS = {
    **_rows("GVA", "sparse", None, {
        "euclidean-adam": ((42, 3135.7, 16.4), (32, -646.2, 27.7), (38, -5042.7, 544.3)),
        "natural-adam": ((42, 3136.1, 27.3), (32, -646.2, 45.8), (38, -5042.6, 1175.0)),
        "natural-snngm": ((10, 3139.4, 5.8), (17, -646.1, 23.0), (13, -5042.8, 370.7)),
    }),
    "sparse": Kind("sparse, our step rule", {"family": "sparse"}),
    **_rows("RVB1", "block", "rvb1", {
        "euclidean-adam": ((8, 3140.1, 3.9), (18, -646.7, 12.2), (8, -5041.9, 73.0)),
        "natural-adam": ((8, 3140.1, 4.1), (18, -646.7, 14.3), (8, -5041.8, 75.6)),
        "natural-snngm": ((5, 3140.1, 2.4), (18, -646.7, 13.4), (5, -5041.8, 46.7)),
    }),
    "rvb1": Kind("RVB1, our step rule", {"reparam": "rvb1"}),
    **_rows("RVB2", "block", "rvb2", {
        "euclidean-adam": ((8, 3140.2, 8.3), (12, -645.5, 37.0), (8, -5041.6, 148.4)),
        "natural-adam": ((6, 3140.2, 6.7), (8, -645.5, 24.4), (8, -5041.5, 150.7)),
        "natural-snngm": ((6, 3140.2, 6.2), (8, -645.5, 25.4), (4, -5041.5, 76.3)),
    }),
    "rvb2": Kind("RVB2, our step rule", {"reparam": "rvb2"}),
    "default": Kind("our default Gaussian", {"posterior": "gaussian"}),
}  # fmt: skip
DEFAULT_KINDS = tuple(key for key in KINDS if not key.endswith("adam"))

FIELDS = (
    "model", "n_groups", "kind", "seed", "cache", *FIT_FIELDS, "lhat", "lhat_se", "elbo", "elbo_se", "left_out",
    "process_seconds", "note", "date", "environment",
)  # fmt: skip
PATH_FIELDS = ("model", "kind", "seed", "iteration", "elbo")

CAPTION = f"""\
L-hat is the mean of log p - log q over {LHAT_DRAWS:,} fresh draws at the end, as in the paper, and "ELBO" the same over
{ELBO_DRAWS:,} draws, where these were taken. Both leave out the constants that the paper does: those of the priors and
of q, and log y! in the Poisson model. Numbers are medians over seeds, with the range in brackets. Seconds are those of
the call of `pm.fit`: cold with an empty compile cache, warm in a new process with the cache that the cold run has left;
building the model is not included. Rows without them were run once, beside other work: their processor seconds count,
which all rows have. The published seconds are those of a Julia program on a Xeon Gold 5222.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows that are missing and write the tables; or, as a process of such a run, one fit."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(options)
        return
    records, paths = Records(options.out, FIELDS), Records(options.paths, PATH_FIELDS)
    if options.seeds:
        if options.data is None or not options.data.is_dir():
            raise SystemExit("Give --data, the folder that holds the data sets.")
        run_missing(records, paths, options)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)
    if ways := paths.read():
        draw_paths(ways, options.figure)


def run_missing(records: Records, paths: Records, options: argparse.Namespace) -> None:
    """Run what is missing; rows that were skipped or failed are tried again."""
    records.drop(lambda row: not row["seconds"] and row["kind"] in options.kinds)
    for model in options.models:
        n_groups = models_glmm.load(model, options.data, options.groups).n_groups
        for kind in options.kinds:
            if options.once:
                run_once(model, n_groups, kind, records, paths, options)
            else:
                run_kind(model, n_groups, kind, records, options)


def run_kind(model: str, n_groups: int, kind: str, records: Records, options: argparse.Namespace) -> None:
    """Run one kind on one model: the first seed cold, then all of them warm."""
    cells = [("cold", 1), *(("warm", seed) for seed in range(1, options.seeds + 1))]
    done = _done(records, model, n_groups, kind)
    missing = [cell for cell in cells if cell not in done]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if missing and missing[0][0] == "warm":  # the cache of the cold run is gone
            _run(model, kind, 1, Path(folder), options, measure=False)
        for cache, seed in missing:
            # Measuring compiles, too: it must not fill the cache of the warm runs.
            found = _run(model, kind, seed, Path(folder), options, measure=cache == "warm")
            _keep(records, {"model": model, "n_groups": n_groups, "kind": kind, "seed": seed, "cache": cache, **found})
            if "seconds" not in found:  # it would end in the same way again
                break


def run_once(
    model: str, n_groups: int, kind: str, records: Records, paths: Records, options: argparse.Namespace
) -> None:
    """Run one kind on one model in one process for each seed, and keep the way of its ELBO."""
    done = _done(records, model, n_groups, kind)
    for seed in range(1, options.seeds + 1):
        if ("once", seed) in done:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = _run(model, kind, seed, Path(folder), options, measure=("warm", seed) not in done)
        for at, elbo in found.pop("path", []):
            paths.append({"model": model, "kind": kind, "seed": seed, "iteration": at, "elbo": elbo})
        _keep(records, {"model": model, "n_groups": n_groups, "kind": kind, "seed": seed, "cache": "once", **found})


def _done(records: Records, model: str, n_groups: int, kind: str) -> set[tuple[str, int]]:
    own = [r for r in records.read() if (r["model"], int(r["n_groups"]), r["kind"]) == (model, n_groups, kind)]
    return {(row["cache"], int(row["seed"])) for row in own}


def _keep(records: Records, row: dict[str, object]) -> None:
    date = datetime.datetime.now().isoformat(timespec="seconds")
    records.append({**row, "date": date, "environment": describe_environment()})
    of = f"{row['model']} {row['kind']} seed {row['seed']} {row['cache']}"
    print(f"{of}: {row.get('status')} {row.get('seconds', '')}", flush=True)


def _run(model: str, kind: str, seed: int, folder: Path, options: argparse.Namespace, *, measure: bool) -> dict:
    groups = ["--groups", options.groups] if options.groups else []
    cell = ["--cell", model, kind, seed, *(["--measure"] if measure else []), *(["--once"] if options.once else [])]
    return run_process(script(__file__, "--data", options.data, *groups, *cell), folder, options.limit)


def run_cell(options: argparse.Namespace) -> None:
    """Fit one model with one kind and report the figures as JSON."""
    model, kind, seed = options.cell[0], KINDS[options.cell[1]], int(options.cell[2])
    glmm = models_glmm.load(model, options.data, options.groups)
    chosen = kind.options_for(glmm)
    if reason := refusal(glmm.model, chosen):
        report(status=f"skipped: {reason}")
        return
    approx, columns = timed_fit(glmm.model, chosen, seed)
    report(**columns)
    if approx is not None and options.once:
        report(path=path_of(approx.hist, glmm.left_out))
    if approx is not None and options.measure:
        report(**assess(approx, glmm.left_out, seed, shortly=options.once))


def assess(approx: Any, left_out: float, seed: int, *, shortly: bool = False) -> dict[str, float]:
    """Return the ELBO as the paper estimates it, and on more draws, both without the constants left out there."""
    columns = {"left_out": left_out}
    estimates = (("lhat", LHAT_DRAWS, LHAT_SEED + seed), ("elbo", ELBO_DRAWS, ELBO_SEED))
    for name, n, of_draws in estimates[:1] if shortly else estimates:
        h = log_ratios(approx, n, of_draws) - left_out
        columns |= {name: float(h.mean()), f"{name}_se": float(h.std(ddof=1) / np.sqrt(n))}
    return columns


def path_of(losses: np.ndarray, left_out: float) -> list[tuple[int, float]]:
    """Return the last iteration of each window, and its mean of log p - log q without what the paper leaves out."""
    n = len(losses) // PATH_WINDOW
    means = -losses[: n * PATH_WINDOW].reshape(n, PATH_WINDOW).mean(axis=1) - left_out
    return [((i + 1) * PATH_WINDOW, float(mean)) for i, mean in enumerate(means)]


def log_ratios(approx: Any, n: int, seed: int) -> np.ndarray:
    """Return log p - log q at fresh draws, (n,), as many at a time as fit in memory."""
    rng = np.random.default_rng(seed)
    size = max(1, CHUNK_ELEMENTS // approx.layout.n_dim)
    parts = []
    for start in range(0, n, size):
        theta = approx.draw_flat(min(size, n - start), rng)
        parts.append(approx.log_p(theta) - approx.log_q(theta))
    return np.concatenate(parts)


# --- tables -------------------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown, one for each model."""
    if not rows:
        return "No results.\n"
    lines = [
        *measured_on(rows),
        CAPTION,
        *_agreement([r for r in rows if not _is_part(r["model"], int(r["n_groups"]))]),
    ]
    for model in MODELS:
        for n_groups in sorted({int(row["n_groups"]) for row in rows if row["model"] == model}):
            own = [row for row in rows if row["model"] == model and int(row["n_groups"]) == n_groups]
            lines += [f"### {TITLES[model]}" + f" (the first {n_groups} only)" * _is_part(model, n_groups), ""]
            lines += [*_model_table(model, own, compare=not _is_part(model, n_groups)), ""]
    return "\n".join(lines)


def _agreement(rows: Sequence[Row]) -> list[str]:
    """Say how far the rows of the paper's methods, on whole data sets, are from what was published."""
    nats, ratios = [], []
    for kind in KINDS:
        for model, cell in KINDS[kind].published.items():
            of = column_of([r for r in rows if (r["model"], r["kind"]) == (model, kind) and r["lhat"]])
            if len(of("lhat")):
                nats.append(float(np.median(of("lhat"))) - cell.lhat)
                ratios.append(float(np.median(of("n_iterations"))) / 1_000 / cell.thousands)
    if not nats:
        return []
    n_rows = sum(len(kind.published) for kind in KINDS.values())
    return [
        f"Of the {n_rows} rows of the paper, {len(nats)} have been run. L-hat less the published one is "
        f"{min(nats):+.1f} to {max(nats):+.1f} nats, {np.median(nats):+.1f} at the median. Iterations are "
        f"{min(ratios):.2f} to {max(ratios):.2f} times as many as published, {np.median(ratios):.2f} at the median.",
        "",
    ]


def _is_part(model: str, n_groups: int) -> bool:
    return n_groups != {"epilepsy": 59, "toenail": 294, "hers": 2031}[model]


def _model_table(model: str, rows: Sequence[Row], *, compare: bool) -> list[str]:
    header = ["row", "seeds", "iterations, thousands", "published", "L-hat", "published", "difference", "ELBO"]
    header += ["gradients", "Hessians", "processor, s", "cold, s", "warm, s", "published", "memory, MiB", "ended"]
    body = []
    for key, kind in KINDS.items():
        own = [row for row in rows if row["kind"] == key]
        if own:
            body.append(_model_row(kind, own, kind.published.get(model) if compare else None))
    return table(header, body)


def _model_row(kind: Kind, rows: Sequence[Row], published: Published | None) -> list[object]:
    warm, cold, once = ([r for r in rows if r["cache"] == cache] for cache in ("warm", "cold", "once"))
    measured = warm or once or cold
    of = column_of(measured)
    lhat = of("lhat")
    off = f"{np.median(lhat) - published.lhat:+.1f}" if published and len(lhat) else "-"
    ends = [row["status"] + (f" ({row['note']})" if row["note"] else "") for row in measured]
    return [
        kind.label,
        len(lhat),
        median(of("n_iterations") / 1000, ".0f" if kind.as_published else ".3f"),
        published.thousands if published else "-",
        median(lhat, ".1f"),
        published.lhat if published else "-",
        off,
        median(of("elbo"), ".2f"),
        median(of("n_gradients"), ",.0f"),
        median(of("n_hessians"), ",.0f"),
        significant(of("cpu_seconds")),
        significant(column_of(cold)("seconds")),
        significant(column_of(warm)("seconds")),
        published.seconds if published else "-",
        significant(of("memory")),
        ", ".join(f"{ends.count(end)} {end}" if len(ends) > 1 else end for end in dict.fromkeys(ends)),
    ]


# --- figure 4 -----------------------------------------------------------------------------------------------------

STYLES = {"gva": ("GVA", "-"), "rvb1": ("RVB1", "--"), "rvb2": ("RVB2", ":")}
COLOURS = {
    "euclidean-adam": ("Euclidean, Adam", "C7"), "natural-adam": ("natural, Adam", "C0"),
    "natural-snngm": ("natural, SNNGM", "C1"),
}  # fmt: skip
#: Nats below and above the best published value that the figure shows.
SHOWN = {"epilepsy": (12, 1.5), "toenail": (6, 1.5), "hers": (12, 2.5)}


def draw_paths(rows: Sequence[Row], file: Path) -> None:
    """Draw the mean of log p - log q over windows of iterations against iterations."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(13, 5.2), layout="constrained")
    for axis, model in zip(axes, MODELS, strict=True):
        for name, (parametrisation, style) in STYLES.items():
            for step, (method, colour) in COLOURS.items():
                own = [r for r in rows if (r["model"], r["kind"], r["seed"]) == (model, f"{name}-{step}", "1")]
                of = column_of(own)
                label = f"{parametrisation}, {method}"
                axis.plot(of("iteration") / 1_000, of("elbo"), style, color=colour, lw=1.2, label=label)
        best = max(kind.published[model].lhat for kind in KINDS.values() if kind.published)
        below, above = SHOWN[model]
        axis.set(title=TITLES[model], xlabel="iterations, thousands", xscale="log")
        axis.set(ylim=(best - below, best + above))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"mean of log p - log q over {PATH_WINDOW} iterations, nats")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--kinds", nargs="+", default=DEFAULT_KINDS, choices=KINDS)
    parser.add_argument("--seeds", type=int, default=5, help="run the seeds 1 to this; 0: only the tables")
    parser.add_argument("--groups", type=int, help="take the first groups only, to try the script out")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=RESULTS / "tan_glmm.csv")
    parser.add_argument("--once", action="store_true", help="one process for each seed, and the way of its ELBO")
    parser.add_argument("--paths", type=Path, default=RESULTS / "tan_glmm_paths.csv", help="the ways of the ELBO")
    parser.add_argument("--table", type=Path, default=RESULTS / "tan_glmm.md", help="page with marks, or a new file")
    parser.add_argument("--figure", type=Path, default=FIGURES / "tan_glmm.png")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "KIND", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
