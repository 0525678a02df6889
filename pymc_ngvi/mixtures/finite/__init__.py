"""Mixtures of Gaussians: components, their weights, and the step rule that adds and drops them."""
