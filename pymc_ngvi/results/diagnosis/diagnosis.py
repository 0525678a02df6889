"""What the checks of an approximation found, and what was computed of it."""

import shutil
import textwrap

from dataclasses import dataclass, field
from html import escape

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.elbo import Elbo, format_gap
from pymc_ngvi.core.psis import Weights, WeightVerdict, khat_limit
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.results.convert import flat_dataset, free_names
from pymc_ngvi.results.distributions import Distribution, Posterior

#: By what quantities are seen to be off, in a clause that they end.
MOVED = "draws that are moved towards the posterior drift"
SCORED = "gradients of log p at draws tell of a drift"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Parameters
    ----------
    text : str
        A sentence.
    cure : str
        Another one; empty where there is nothing to do.
    serious : bool
        Whether q is not reliable for it.
    """

    text: str
    cure: str
    serious: bool

    def __str__(self) -> str:
        """Return both sentences."""
        return f"{self.text} {self.cure}".rstrip()


#: Characters in a line at most, fewer on a narrow terminal; coordinates in the table.
_MAX_WIDTH, _N_ROWS = 100, 8
#: What is left out where evaluations are too few to compare log p with its images.
SYMMETRIES = "symmetries of log p"
_RELIABLE = "Reliable, as far as these checks can tell."
#: Columns of the table, by diagnostic; how they are shown.
_SHOWN = {"mean_drift": "mean, sd", "sd_drift": "sd, %", "skewness_drift": "skewness", "khat": "k-hat"}


def wrap(text: str, first: str = "", then: str = "") -> str:
    """Return a text in lines of the width of the terminal, with what these begin with."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `NGVIApproximation.diagnose` returns.

    Parameters
    ----------
    findings : tuple of Finding
        Serious ones first.
    outcome : str
        How the fit ended.
    gap : float
        Nats still to be gained within the family; NaN where unknown.
    elbo : Elbo
        On fresh draws.
    weights : Weights
        Pareto k-hat and effective sample size of importance weights.
    by_coordinate : dict of str to ndarray, shape (n_dim,)
        ``mean_drift`` in standard deviations of q, ``sd_drift`` relative to them, ``skewness_drift``, each with its
        standard error, ``_se``; ``khat``, NaN where it was not computed.
    log_p_drift : Elbo
        Drift of E[log p], nats.
    acceptance : float
        Of the trajectories that moved draws.
    n_moved, n_trajectories : int
        Draws that were moved, and how often.
    thorough : bool
        Whether other modes and fits were looked for.
    n_gradients, n_log_p : int
        Evaluations that it took: gradients, and log densities alone.
    layout : Layout
    left_out : tuple of str
        What was left out for want of evaluations within the budget.
    open : str
        Why the verdict is open, and what settles it; empty where it is not.
    posterior : str
        Of an exact posterior: what was measured of it, in a sentence. Outcome, gap and ELBO are of the Gaussian fit.
    joint, computed : str
        What moved draws show of log p, and how many Deterministics and linear predictors were compared, in words.
    searched : bool
        Whether the fit looked for other modes.
    has_one_mode : bool
        Whether log p is known to have one alone.
    scored : str
        Where gradients of log p at draws were looked at, beside those of moved draws, in words.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> diagnosis = approx.diagnose(random_seed=1)
    >>> diagnosis.reliable, diagnosis.reasons
    (True, [])
    """

    findings: tuple[Finding, ...]
    outcome: str
    gap: float
    elbo: Elbo
    weights: Weights
    by_coordinate: dict[str, Array]
    log_p_drift: Elbo
    acceptance: float
    n_moved: int
    n_trajectories: int
    thorough: bool
    n_gradients: int
    n_log_p: int
    layout: Layout = field(repr=False)
    left_out: tuple[str, ...] = ()
    open: str = ""
    posterior: str = ""
    joint: str = ""
    computed: str = ""
    searched: bool = False
    has_one_mode: bool = False
    scored: str = ""

    @property
    def verdict(self) -> str:
        """One of "reliable", "not reliable", and "not judged" where too few evaluations were within the budget."""
        if any(f.serious for f in self.findings):
            return "not reliable"
        return "not judged" if self.open else "reliable"

    @property
    def reliable(self) -> bool:
        """Whether means and standard deviations can be relied on, as far as the checks see."""
        return self.verdict == "reliable"

    @property
    def reasons(self) -> list[str]:
        """Why q is not reliable: sentences that name variables and a cure; empty where it is."""
        return [str(f) for f in self.findings if f.serious]

    @property
    def remarks(self) -> list[str]:
        """What else was found, of less weight."""
        return [str(f) for f in self.findings if not f.serious]

    @property
    def khat(self) -> float:
        """Pareto k-hat of the importance weights."""
        return self.weights.khat

    def to_dataset(self) -> xr.Dataset:
        """Return what is known of each coordinate.

        Returns
        -------
        xarray.Dataset
            By value name (``sd_log__``), with dims ``diagnostic`` (the names in ``by_coordinate``) and those of the
            variable; a dim of the model that is called ``diagnostic`` puts ``q_`` before it. Verdict, k-hat and the
            rest are in ``attrs``.
        """
        names = list(self.by_coordinate)
        (dim,) = free_names(self.layout, "diagnostic")
        result = flat_dataset(self.layout, np.stack([self.by_coordinate[n] for n in names]), {dim: names})
        attrs = {
            "reliable": int(self.reliable),
            "verdict": self.verdict,
            "reasons": self.reasons,
            "khat": self.khat,
            "gap": self.gap,
        }
        attrs |= {"elbo": self.elbo.value, "elbo_se": self.elbo.se, "effective_sample_size": self.weights.effective}
        return result.assign_attrs(attrs)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each coordinate, by label."""
        labels = [self.layout.label(i) for i in range(self.layout.n_dim)]
        return pd.DataFrame(self.by_coordinate, index=labels)

    # --- in words ---

    def __str__(self) -> str:
        """Return the report, wrapped to the width of the terminal."""
        parts = [wrap(self.headline())]
        parts += [wrap(text, f"  {i}. ", "     ") for i, text in enumerate(self._texts(True), 1)]
        parts += [wrap(cure, "  -> ", "     ") for cure in self._cures()]
        if remarks := self.remarks:
            parts += ["", "Also:", *(wrap(text, "  - ", "    ") for text in remarks)]
        pad = max(len(name) for name, _ in self._rows()) + 2
        parts += ["", *(wrap(text, name.ljust(pad), " " * pad) for name, text in self._rows())]
        return "\n".join([*parts, "", wrap(self._of_table()), self._table().to_string()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        reasons = "".join(f"<li>{escape(text)}</li>" for text in self._texts(True))
        cures = "".join(f"<p>&rarr; {escape(cure)}</p>" for cure in self._cures())
        remarks = "".join(f"<li>{escape(text)}</li>" for text in self.remarks)
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        return (
            f"<p><b>{escape(self.headline())}</b></p>"
            + (f"<ol>{reasons}</ol>{cures}" if reasons else "")
            + (f"<p>Also:</p><ul>{remarks}</ul>" if remarks else "")
            + f"<table>{rows}</table><p>{escape(self._of_table())}</p>{self._table().to_html()}"
        )

    def headline(self) -> str:
        """Return the verdict in a sentence."""
        if self.verdict == "not judged":
            return f"Not judged: {self.open}"
        if self.reliable:
            return f"{_RELIABLE}{self._of_search()}"
        n = len(self.reasons)
        return f"Not reliable, for {n} reason{'s'[: n != 1]}:"

    def in_short(self) -> str:
        """Return the verdict with its first reason and all cures, for a summary."""
        if self.verdict != "not reliable":
            more = "" if self.verdict == "not judged" or self.thorough else " More: approx.diagnose()."
            return (_RELIABLE if self.reliable else self.headline()) + more
        others = len(self.reasons) - 1
        rest = f" ({others} more reason{'s'[: others != 1]}: approx.diagnose())" if others else ""
        return " ".join([f"Not reliable{rest}.", self._texts(True)[0], *self._cures()])

    def _of_search(self) -> str:
        """Return a sentence on other modes, for a headline."""
        if self.thorough:
            return ""
        if self.has_one_mode:
            return " The posterior has one mode, as its log density is concave."
        if self.searched:
            return " A search found no other modes."
        return f" Other modes were {self._search()} (thorough=True)."

    def _search(self) -> str:
        if self.has_one_mode:
            return "none, as the log density is concave"
        if self.searched:
            return "looked for after the fit"
        compared = self.n_log_p and SYMMETRIES not in self.left_out
        return "not looked for, but for those by symmetry" if compared else "not looked for"

    def _texts(self, serious: bool) -> list[str]:
        return [f.text for f in self.findings if f.serious is serious]

    def _cures(self) -> list[str]:
        """Return the cures of serious findings, each once."""
        return list(dict.fromkeys(f.cure for f in self.findings if f.serious and f.cure))

    def _rows(self) -> list[tuple[str, str]]:
        """Return what was measured, by name."""
        w = self.weights
        lost = f", {w.n_lost:,} of them lost" if w.n_lost else ""
        moved = f"{self.n_moved:,} draws, {self.n_trajectories} trajectories each, acceptance {self.acceptance:.2f}"
        gap = "" if self.posterior else f", gap {format_gap(self.gap, ' nats')}"
        rows = [("Gaussian fit" if self.posterior else "Fit", f"{self.outcome}{gap}, ELBO {self.elbo}")]
        if self.posterior:
            rows.insert(0, ("Posterior", self.posterior))
        if w.n_draws and not (self.posterior and w.khat == -np.inf):  # draws of chains have no weights
            meaning = "of the weights of the global parameters" if self.posterior else self._of_khat()
            rows.append(("Pareto k-hat", f"{w.khat_text()}{' ' if self.posterior else ': '}{meaning}"))
            rows.append(("Weighted draws", f"{w.n_draws:,} are worth {w.effective:,.0f}{lost}"))
        if self.n_moved:
            rows.append(("Moved draws", f"{moved}; E[log p] drifts by {self.log_p_drift} nats"))
        texts = (("Gradients", self.scored), ("Joint density", self.joint), ("Computed", self.computed))
        rows += [(name, text) for name, text in texts if text]
        rows.append(("Other modes", "looked for from dispersed starts" if self.thorough else self._search()))
        rows.append(("Cost", f"{self.n_gradients:,} gradients, {self.n_log_p:,} log densities"))
        if self.left_out:
            text = "; ".join(self.left_out)
            rows.append(("Left out", f"{text} (evaluations of this model are dear; diagnose(draws=10_000) has them)"))
        return rows

    def _of_khat(self) -> str:
        limit, verdict = khat_limit(self.weights.n_draws), self.weights.verdict(self.layout.n_dim)
        if verdict is WeightVerdict.EVEN:
            return "of no weight, as importance weights are nearly equal"
        trusted = "can correct q" if verdict.helps else "can't correct q"
        return f"importance weights {trusted} (limit {limit:.2f})"

    def _worst(self) -> NDArray[np.intp]:
        """Return the coordinates that stand out most, the worst first."""
        values = self.by_coordinate
        with np.errstate(invalid="ignore"):
            size = np.fmax(np.abs(values["mean_drift"]) / 0.3, np.abs(values["sd_drift"]) / 0.25)
        return np.argsort(-np.nan_to_num(size), kind="stable")[:_N_ROWS]

    def _of_table(self) -> str:
        which = f" The worst {_N_ROWS} of {self.layout.n_dim:,} coordinates:" if self.layout.n_dim > _N_ROWS else ""
        how = (
            "By how much q is off, as gradients of log p at draws tell"
            if self.scored
            else "By how much draws of q change when they are moved towards the posterior: the least by which q is off"
        )
        return f"{how} (unconstrained).{which}"

    def _table(self) -> pd.DataFrame:
        worst, of = self._worst(), self.by_coordinate
        columns = {}
        for name, title in _SHOWN.items():
            scale, form = (100.0, "+.0f") if name == "sd_drift" else (1.0, "+.2f")
            if name == "khat":
                columns[title] = [f"{v:.2f}" if np.isfinite(v) else "-" for v in of[name][worst]]
                continue
            pairs = zip(scale * of[name][worst], scale * of[f"{name}_se"][worst], strict=True)
            columns[title] = [f"{v:{form}} ± {se:{form[1:]}}" if np.isfinite(v) else "-" for v, se in pairs]
        return pd.DataFrame(columns, index=[self.layout.label(int(i)) for i in worst])


@dataclass
class Kept:
    """Results that are kept between calls, and what they are of."""

    q: Distribution | None = None
    density: ModelDensity | None = None
    #: Importance weights of draws that belong to the fit; shape (n_draws,), optional.
    log_ratio: Array | None = None
    diagnosis: Diagnosis | None = None
    #: The budget that the diagnosis was given.
    share: tuple[float, float] = (0.0, 0.0)
    #: Evaluates the variables that were named last.
    narrow: Constrainer | None = None

    def follow(self, posterior: Posterior) -> "Kept":
        """Forget what is of another q, or of another density; return this object."""
        if self.density is not posterior.density:
            self.narrow = None
        elif self.q is posterior.distribution:
            return self
        self.q, self.density, self.log_ratio, self.diagnosis = posterior.distribution, posterior.density, None, None
        return self

    @property
    def verdict(self) -> str | None:
        """That of the diagnosis; None where none was made."""
        return None if self.diagnosis is None else self.diagnosis.verdict
