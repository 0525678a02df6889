"""Draws of a fit that are moved towards the posterior, as many chains at once, until they have arrived."""
