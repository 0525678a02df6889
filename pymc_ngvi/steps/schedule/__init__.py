"""The schedule of a fit, the same for every q: solve on fixed draws, average over fresh ones, stop in nats."""
