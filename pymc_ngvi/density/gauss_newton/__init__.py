"""The diagonal of the Gauss-Newton matrix of a model: squares of the gradients of single rows, and of the prior."""
