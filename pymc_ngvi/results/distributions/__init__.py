"""The distributions of fits, as reports read them."""
