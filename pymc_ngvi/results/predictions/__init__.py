"""Predictions for new data: `either.py` says whose, and `predict.py` makes them."""
