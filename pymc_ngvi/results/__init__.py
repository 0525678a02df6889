"""What comes of a fit: the approximation, and all that it reports."""
