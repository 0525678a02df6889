"""Linear predictors: log p as a function of few affine functions of theta, and what follows for its derivatives."""
