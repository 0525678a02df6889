"""New rows: the posterior given these as well, from draws of the one that was fitted and the new rows alone."""
