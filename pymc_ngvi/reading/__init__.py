"""What the graph of a model says: roles of its variables, predictors, rows, and which coordinates meet in them."""
