"""What the priors of a model do to its posterior, from draws that are there: other priors, and power scaling."""
