"""Matrices of one structure as arrays: factors and curvatures of Gaussians, without their zeros."""
