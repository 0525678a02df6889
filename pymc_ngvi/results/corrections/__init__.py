"""What can be corrected after a fit: importance weights for any q."""
