"""Whether an approximation can be relied on: k-hat, and the diagnosis."""

import numpy as np

from pymc_ngvi.core.psis import pareto_khat
from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.diagnosis.diagnose import requested_diagnosis
from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.weights import log_ratio_of
from pymc_ngvi.results.fitted import Fitted


class DiagnosisMethods(Fitted):
    """Whether q can be relied on."""

    def khat(self, draws: int | None = None, random_seed: Seed = None) -> float:
        """Return the Pareto k-hat of the importance weights: the shape of their tail.

        Parameters
        ----------
        draws : int, optional
            Default: 10,000, or fewer where these would cost much more than the fit did. A message says so.
        random_seed : int, Generator or None
            Default: a seed that belongs to the fit. Without arguments, k-hat is computed once and kept until q changes.
            With an argument it is computed anew, and varies by about .1 at 10,000 draws.

        Returns
        -------
        float
            Up to .7, importance weights can correct q. Above .7 they can't, unless they are nearly equal.
            `NGVIApproximation.diagnose` and `summary` say whether they are, and give the standard error of k-hat. For
            an exact posterior, the k-hat is that of its pool of global parameters, whatever the arguments.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit.
        """
        own = draws is None and random_seed is None
        ratio = log_ratio_of(self._posterior, self._kept, draws, None if own else self.generator(random_seed))
        return pareto_khat(ratio, np.zeros(len(ratio)))

    def diagnose(self, *, thorough: bool = False, draws: int | None = None, random_seed: Seed = None) -> Diagnosis:
        """Return whether means and standard deviations of q can be relied on, why not, and what to do.

        Pareto k-hat describes the tails of the weights. It does not show how far the bulk of q is off, or that q misses
        a mode. Therefore draws of q are also moved towards the posterior, by a few Hamiltonian trajectories: the error
        of q is at least the change in their moments. Labels are exchanged as well, and signs changed. Where log p stays
        the same then, but q does not, q covers one of several equal modes.

        Parameters
        ----------
        thorough : bool, default False
            Move more draws for longer, look for other modes from dispersed points, and fit once more from a dispersed
            start.
        draws : int, optional
            For k-hat and the effective sample size; at least 100. Fewer are used above 3,300 dimensions. Default:
            10,000, or as many as a budget allows where evaluations are expensive. A number that is given has no budget.
        random_seed : int, Generator or None
            Default: a seed that belongs to the fit. The diagnosis is then made once and kept until q changes.

        Returns
        -------
        Diagnosis
            ``reliable``, ``reasons``; ``print`` shows the report, ``to_dataset()`` has all figures by variable.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit; for a model that reads
            minibatches.

        Notes
        -----
        A fit to minibatches is "not judged": ask on a model of all of the data, on which `load` puts it.

        A diagnosis takes ``draws`` log densities and up to about 8,000 gradients. ``thorough=True`` takes about 50,000
        gradients more, and another fit. By default there is a budget, about as long as the fit took or some seconds. It
        is a number of evaluations that follows from the graph, the sizes of the data and the evaluations of the fit,
        not from the clock. Where the budget is too small to tell, the verdict is "not judged". The report says what was
        evaluated, and what was left out.

        References
        ----------
        .. [1] Yao, Vehtari, Simpson, Gelman (2018). Yes, but did it work? Evaluating variational inference. ICML.
           https://doi.org/10.48550/arXiv.1802.02538

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     v = pm.Normal("v", 0.0, 3.0)
        ...     x = pm.Normal("x", 0.0, pm.math.exp(v / 2), shape=4)
        ...     approx = pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=1, progressbar=False)
        >>> diagnosis = approx.diagnose(random_seed=1)
        >>> diagnosis.reliable
        False
        >>> "`v`" in diagnosis.reasons[0]
        True
        """
        own = not thorough and draws is None and random_seed is None
        rng = None if own else self.generator(random_seed)
        return requested_diagnosis(self._posterior, self._kept, rng, draws, thorough=thorough)
