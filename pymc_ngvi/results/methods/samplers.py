"""What an approximation gives a sampler to start from."""

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.samplers import Covariance, SamplerInit, sampler_init


class SamplerMethods(Fitted):
    """A start for NUTS."""

    def sampler_init(
        self, chains: int = 4, random_seed: Seed = None, *, covariance: Covariance = "auto"
    ) -> SamplerInit:
        """Return initial points and a mass matrix for NUTS.

        Parameters
        ----------
        chains : int, default 4
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the starts, which are draws of q.
        covariance : {"auto", "dense", "diagonal"}, default "auto"
            What is taken from the covariance of q. "auto" takes all of it up to 500 dimensions.

        Returns
        -------
        SamplerInit
            ``pm.sample(tune=200, **approx.sampler_init(4).kwargs())`` uses it.

        Raises
        ------
        ValueError
            For bad arguments; for a model that reads minibatches; where log p is not finite at the draws of q, or the
            variance of q is not finite; above 5,000 dimensions with a dense covariance.

        References
        ----------
        .. [1] Hoffman, Gelman (2014). The No-U-Turn sampler. JMLR 15, 1593-1623.
           https://doi.org/10.48550/arXiv.1111.4246
        """
        return sampler_init(self._posterior, chains, self.generator(random_seed), covariance)
