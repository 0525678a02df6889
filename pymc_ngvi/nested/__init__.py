"""Latent Gaussian models: hyperparameters sampled, latent variables by a Gaussian for each value of these."""
