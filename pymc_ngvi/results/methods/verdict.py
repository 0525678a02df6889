"""The verdict on an approximation in a few sentences, as summaries show it."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.psis import Weights
from pymc_ngvi.results.diagnosis.budget import SUMMARY
from pymc_ngvi.results.diagnosis.diagnose import budget_of
from pymc_ngvi.results.diagnosis.weights import DRAWS, own_generator, weights_and_elbo
from pymc_ngvi.results.methods.diagnosis import DiagnosisReport

_NOT_CONVERGED = "Not reliable: the fit did not converge."


@dataclass(frozen=True)
class Verdict:
    """Whether an approximation can be relied on, in short.

    Parameters
    ----------
    word : {"reliable", "not reliable", "not judged"}
    sentence : str
        The same with the first reason, and what may help.
    weights : Weights or None
        None where no importance weights were computed.
    """

    word: str
    sentence: str
    weights: Weights | None = None

    @property
    def khat(self) -> float | None:
        """Pareto k-hat of the importance weights."""
        return None if self.weights is None else self.weights.khat


class VerdictReport(DiagnosisReport):
    """The part of an approximation that says in a few sentences whether it can be relied on."""

    def _verdict_lines(self, khat_draws: int | None, rng: np.random.Generator) -> tuple[tuple[str, ...], Verdict]:
        """Return the sentences above the table of a summary, and the verdict.

        Parameters
        ----------
        khat_draws : int or None
            10,000: what belongs to the fit, within the budget of a summary. Another number: k-hat from so many draws.
            None leaves the verdict out.
        rng : Generator
            For draws that do not belong to the fit.

        Returns
        -------
        lines : tuple of str
        verdict : Verdict
        """
        lines, seed = list(self._lines_of_fit()), int(rng.integers(2**63))
        verdict = self._verdict(khat_draws, np.random.default_rng(seed))
        if verdict.sentence:
            lines.append(verdict.sentence)
        if verdict.weights is not None and self._distribution.kept_log_weights() is None:
            lines.append(verdict.weights.sentence(self.layout.n_dim))
            same = own_generator(self.record) if khat_draws == DRAWS else np.random.default_rng(seed)
            remark = self._distribution.remark(self.density, self.record, verdict.weights.n_draws, same)
            lines += [remark] * bool(remark)
        return tuple(lines), verdict

    def _lines_of_fit(self) -> tuple[str, ...]:
        record = self.record
        if record is None:
            return ("This approximation was not made by a fit.",)
        lines = [record.closing_line(), record.posterior]
        if not (record.converged or record.is_exact):
            lines.insert(1, f"{record.sentence} {record.status.cure}")
        return tuple(filter(None, lines))

    def _verdict(self, khat_draws: int | None, rng: np.random.Generator) -> Verdict:
        converged = self.record is None or self.record.converged or self.record.is_exact
        if khat_draws is None:
            return Verdict("not judged", "")
        if self.density.has_minibatch or self._data.changed():
            why = "the model reads pm.Minibatch data" if self.density.has_minibatch else "the data were changed"
            return Verdict("not judged", f"Not judged: {why}.") if converged else Verdict("not reliable", "")
        weights = None
        if khat_draws != DRAWS:
            weights = weights_and_elbo(self._log_ratio(khat_draws, rng))[0]
        if not converged:
            if weights is None:
                weights = self._summary_weights()
            return Verdict("not reliable", _NOT_CONVERGED, weights)
        diagnosis = self._standing(SUMMARY)
        if weights is None and diagnosis.weights.n_draws:
            weights = diagnosis.weights
        return Verdict(diagnosis.verdict, diagnosis.in_short(), weights)

    def _summary_weights(self) -> Weights | None:
        """Return the weights that belong to the fit, as far as the budget of a summary allows."""
        n = budget_of(self._posterior, SUMMARY).n_weights
        return weights_and_elbo(self._own_ratio(n))[0] if n else None
