"""The tables of the benchmark of exact posteriors."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pages import column_of, measured_on, median, significant, table
from records import Row

ABOUT_REFERENCES = """\
Beside NUTS (10,000 draws or more), medians over seeds with the range. em and es: root mean square over all
coordinates of the error of the mean in standard deviations, and of the relative error of the standard deviation; of
4,000 draws, and of `mean_flat` and `sd_flat`. The floor of 4,000 draws and of the references is about .016 and .011.
Worst global: largest errors of fixed effects and scales, of mean and of sd. Processor seconds of the call of
`pm.fit`: cold, with an empty compile cache in a new process; warm, the call again in the same process. Ratio: to
`posterior="gaussian"`, both warm in one process, and both cold.
"""

ABOUT_SCHOOLS = """\
Eight schools beside the answer, from numerical integration over (mu, log tau). Of the seeds: root mean square and, in
brackets, the largest absolute value. Floor of 4,000 draws: .016 and .011. log p(y) and elpd: errors in nats, of the
log marginal likelihood, with the error it reports, and of the sum of leave-one-group-out densities.
"""

ABOUT_GROUPS = """\
Logistic regression with a random intercept for each group of 10, simulated. Error of log m: standard deviation over
posterior draws of the globals of the difference to 41 nodes, in nats; the constant is of no account. Means: the
largest shift of a global's weighted mean that the difference makes, in standard deviations. Nodes: of the reference
rule, and of the one in use. Seconds are processor seconds, cold, as is the ratio to the Gaussian fit.
"""

ABOUT_REFUSALS = """\
Models that have no exact posterior: `posterior="exact"` raises an error. By default, a nested posterior is returned
where there is one within the time that a call may take, or else the Gaussian; the record says which, and why.
Processor seconds, warm, beside those of `posterior="gaussian"`.
"""

ABOUT_RIVALS = """\
One seed. em and es from 4,000 draws (nutpie: its own 4,000), exact moments for ADVI and Laplace. Processor seconds of
the call with draws, cold with an empty compile cache, and warm: in a new process with a filled one (our first two
rows: again in the same process, without draws). Effective draws: the least bulk size of a global for nutpie, the size
of the weighted draws of the globals for the exact posterior; and how many of them a warm processor second makes.
"""


ABOUT_EVIDENCE = """\
log p(y) with its reported error, of one fit, beside bridge sampling (Meng and Wong, 1996) from 4 chains of 5,000
draws of NUTS in the unconstrained space: a Gaussian with the moments of one half of each chain is the proposal for the
other half, and the mean of both ways round is taken, with its estimated error. Processor seconds of the call of
`pm.fit`, and of sampling and the bridge.
"""

ABOUT_LEFT_OUT = """\
Epilepsy: the log predictive density of a patient's counts given those of all others, a mean of 5 fits with the standard
deviation between them, beside the difference in log p(y) between these fits and one without the patient, with its
error. The three patients of the least densities, and three evenly from the others. Seconds: of the densities of all
patients, in one call, and of one fit.
"""

ABOUT_TAILS = """\
Toenail, non-centred: 1 % and 99 % quantiles of the effects of all patients without a single infection, standardised
(`z`) and on the scale of the model (`s z`), of 5 fits with 4,000 draws each, beside 4 chains of 10,000 draws of NUTS.
Everything is in standard deviations of that patient's effect. Means over patients, with Monte Carlo errors from fits
and from halves of chains; the root mean square over patients of the difference, what it would be by the Monte Carlo
error of both alone, and the largest difference.
"""


def write(rows: Sequence[Row], checks: Sequence[Row] = ()) -> str:
    """Return all tables as Markdown; ``checks`` has the rows of ``exact_checks.py``."""
    if not rows and not checks:
        return "No results.\n"
    lines = ["The rows are in [`exact.csv`](exact.csv) and [`exact_checks.csv`](exact_checks.csv).", ""]
    lines += measured_on([*rows, *checks])
    for part, (title, about, make) in _TABLES.items():
        own = [row for row in rows if row["part"] == part]
        if part == "rivals" and own:  # and our own fits beside them
            own += [row for row in rows if row["part"] == "references" and row["seed"] == "1"]
        if own:
            lines += [f"## {title}", "", about, *make(own), ""]
    for part, (title, about, make) in _CHECKS.items():
        if own := [row for row in checks if row["part"] == part]:
            failed = [f"{row['model']}: {row['status']}." for row in own if row["status"] != "ok"]
            good = [row for row in own if row["status"] == "ok"]
            lines += [f"## {title}", "", about, *failed, *(make(good) if good else []), ""]
    return "\n".join(lines)


def _references(rows: Sequence[Row]) -> list[str]:
    header = (
        "model", "posterior", "seeds", "em", "es", "em, moments", "es, moments", "worst global, mean",
        "worst global, sd", "k-hat", "effective size", "exact", "`diagnose()`", "cold, s", "warm, s", "ratio, warm",
        "ratio, cold",
    )  # fmt: skip
    lines = []
    for (model, method), own in _grouped(rows, "model", "method"):
        of = column_of(own)
        errors = [median(of(name), ".3f") for name in ("em", "es", "em_moments", "es_moments")]
        gaussian = [row for row in rows if row["model"] == model and row["method"] == "gaussian"]
        warm = of("warm_cpu") if method == "exact" else column_of(rows_of(rows, model, "exact"))("gaussian_cpu")
        ratios = _ratios(own, gaussian) if method == "exact" else ["-", "-"]
        lines.append([
            model, method, len(own), *errors, _worst(own, "worst_mean"), _worst(own, "worst_sd"),
            median(of("khat"), ".2f"), median(of("ess"), ",.0f"), f"{int(of('is_exact').sum())} of {len(own)}",
            _counted(own, "diagnosis"), median(of("cold_cpu"), ".1f"), median(warm, ".1f"), *ratios,
        ])  # fmt: skip
    return table(header, lines)


def rows_of(rows: Sequence[Row], model: str, method: str) -> list[Row]:
    """Return the rows of a model and a method."""
    return [row for row in rows if (row["model"], row["method"]) == (model, method)]


def _ratios(exact: Sequence[Row], gaussian: Sequence[Row]) -> list[str]:
    """Return ratios of processor seconds, exact over Gaussian: warm in one process, and cold for the same seeds."""
    warm = [float(r["warm_cpu"]) / float(r["gaussian_cpu"]) for r in exact if r["warm_cpu"]]
    other = {r["seed"]: r["cold_cpu"] for r in gaussian}
    cold = [float(r["cold_cpu"]) / float(other[r["seed"]]) for r in exact if r["cold_cpu"] and other.get(r["seed"])]
    return [median(np.array(warm), ".1f"), median(np.array(cold), ".1f")]


def _schools(rows: Sequence[Row]) -> list[str]:
    header = (
        "model", "seeds", "exact", "em", "es", "em, moments", "es, moments", "mu and tau, mean", "mu and tau, sd",
        "log p(y)", "its se", "elpd", "k-hat", "`diagnose()`", "seconds",
    )  # fmt: skip
    lines = []
    for (model,), own in _grouped(rows, "model"):
        of = column_of(own)
        names = ("em", "es", "em_moments", "es_moments", "worst_mean", "worst_sd", "log_evidence")
        lines.append([
            model, len(own), f"{int(of('is_exact').sum())} of {len(own)}", *(_rms(of(name)) for name in names),
            median(of("log_evidence_se"), ".3f"), _rms(of("elpd")), median(of("khat"), ".2f"),
            _counted(own, "diagnosis"), median(of("cold_cpu"), ".1f"),
        ])  # fmt: skip
    return table(header, lines)


def _groups(rows: Sequence[Row]) -> list[str]:
    header = (
        "model", "posterior", "exact", "error of log m", "means", "nodes", "k-hat", "effective size", "seconds",
        "ratio", "peak memory, MiB", "before the fit",
    )  # fmt: skip
    lines = []
    for (model, method), own in _grouped(rows, "model", "method"):
        of = column_of(own)
        cold = _ratios(own, rows_of(rows, model, "gaussian"))[1] if method == "exact" else "-"
        verdict = own[0]["verdict"] or own[0]["status"]
        lines.append([
            model, method, verdict if method == "exact" else "-", median(of("log_m_error"), ".4f"),
            median(of("mean_shift"), ".4f"), own[0]["nodes"] or "-", median(of("khat"), ".2f"),
            median(of("ess"), ",.0f"), median(of("cold_cpu"), ".0f"), cold, median(of("memory"), ",.0f"),
            median(of("memory_before"), ",.0f"),
        ])  # fmt: skip
    return table(header, lines)


def _refusals(rows: Sequence[Row]) -> list[str]:
    header = ("model", "says no", "what the record says", 'what posterior="exact" raises', "seconds", "Gaussian alone")
    lines = []
    for row in rows:
        refused = "**no**" if row["asked"].startswith("nothing") else "yes"
        seconds = [significant(column_of([row])(name)) for name in ("warm_cpu", "gaussian_cpu")]
        lines.append([row["model"], refused, row["verdict"], row["asked"], *seconds])
    return table(header, lines)


def _rivals(rows: Sequence[Row]) -> list[str]:
    header = (
        "model", "method", "em", "es", "worst global, mean", "worst global, sd", "cold, s", "warm, s",
        "effective draws", "a second", "from",
    )  # fmt: skip
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows if row["part"] == "rivals"):
        own = [row for row in rows if row["model"] == model]
        own.sort(key=lambda row: row["part"] == "rivals")  # ours first
        exact = {row["method"]: row for row in own}.get("exact", {})
        for row in own:
            warm = row["warm_cpu"] or (exact.get("gaussian_cpu", "") if row["method"] == "gaussian" else "")
            if row["status"] != "ok" and not row["em"]:
                seconds = [significant([float(s)]) if s else "-" for s in (row["cold_cpu"], warm)]
                lines.append([model, row["method"], *["-"] * 4, *seconds, "-", "-", row["status"]])
                continue
            of = column_of([row])
            rate = significant(of("ess") / float(warm)) if warm else "-"
            lines.append([
                model, row["method"], median(of("em"), ".3f"), median(of("es"), ".3f"), _worst([row], "worst_mean"),
                _worst([row], "worst_sd"), significant(of("cold_cpu")), significant([float(warm)]) if warm else "-",
                significant(of("ess")), rate, row["how"] or "4,000 draws",
            ])  # fmt: skip
    return table(header, lines)


def _evidence(rows: Sequence[Row]) -> list[str]:
    header = (
        "model",
        "coordinates",
        "exact",
        "bridge sampling",
        "difference",
        "its error",
        "seconds",
        "NUTS and bridge",
    )
    lines = []
    for row in rows:
        values = [f"{float(row[name]):,.3f} ± {float(row[f'{name}_se']):.3f}" for name in ("ours", "other")]
        seconds = [significant([float(row[name])]) for name in ("ours_cpu", "other_cpu")]
        error = float(np.hypot(float(row["ours_se"]), float(row["other_se"])))
        lines.append([row["model"], row["n_dim"], *values, _apart(row), f"{error:.3f}", *seconds])
    return table(header, lines)


def _left_out(rows: Sequence[Row]) -> list[str]:
    header = ("group", "left out", "k-hat", "fit without it", "difference", "seconds, all groups", "one fit")
    lines = []
    for row in rows:
        ours, other = (f"{float(row[name]):.3f} ± {float(row[f'{name}_se']):.3f}" for name in ("ours", "other"))
        seconds = [significant([float(row[name])]) for name in ("ours_cpu", "other_cpu")]
        lines.append([row["item"], ours, f"{float(row['khat']):.2f}", other, _apart(row), *seconds])
    return table(header, lines)


def _tails(rows: Sequence[Row]) -> list[str]:
    header = (
        "quantile", "patients", "exact, mean", "NUTS, mean", "difference, rms", "by Monte Carlo error alone",
        "largest",
    )  # fmt: skip
    lines = []
    for row in rows:
        means = [f"{float(row[name]):.3f} ± {float(row[f'{name}_se']):.3f}" for name in ("ours", "other")]
        errors = [f"{float(row[name]):.3f}" for name in ("apart", "expected")]
        lines.append([row["item"], row["n"], *means, *errors, f"{float(row['worst']):+.3f}"])
    return table(header, lines)


def _apart(row: Row) -> str:
    return f"{float(row['ours']) - float(row['other']):+.3f}"


_TABLES: dict[str, tuple[str, str, Callable[[Sequence[Row]], list[str]]]] = {
    "references": ("Against NUTS", ABOUT_REFERENCES, _references),
    "schools": ("Eight schools", ABOUT_SCHOOLS, _schools),
    "groups": ("Many groups", ABOUT_GROUPS, _groups),
    "refusals": ("Where it says no", ABOUT_REFUSALS, _refusals),
    "rivals": ("Beside other methods", ABOUT_RIVALS, _rivals),
}
_CHECKS: dict[str, tuple[str, str, Callable[[Sequence[Row]], list[str]]]] = {
    "evidence": ("The marginal likelihood", ABOUT_EVIDENCE, _evidence),
    "left_out": ("Groups left out", ABOUT_LEFT_OUT, _left_out),
    "tails": ("Tails of group effects", ABOUT_TAILS, _tails),
}


def _grouped(rows: Sequence[Row], *names: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return [(key, [row for row in rows if tuple(row[name] for name in names) == key]) for key in keys]


def _worst(rows: Sequence[Row], column: str) -> str:
    """Return the value that is farthest from 0, with its coordinate."""
    given = [row for row in rows if row[column]]
    if not given:
        return "-"
    row = max(given, key=lambda row: abs(float(row[column])))
    return f"{float(row[column]):+.3f} `{row[f'{column}_name']}`"


def _rms(values: np.ndarray) -> str:
    if not len(values):
        return "-"
    return f"{np.sqrt(np.mean(values**2)):.3f} ({np.abs(values).max():.3f})"


def _counted(rows: Sequence[Row], column: str) -> str:
    counts = Counter(row[column] for row in rows if row[column])
    return ", ".join(f"{n} {value}" for value, n in counts.most_common()) or "-"
