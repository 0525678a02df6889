"""The methods of an approximation, by subject."""
