"""Which posterior comes of a model: the plan, its candidates with their prices, and the way through it."""
