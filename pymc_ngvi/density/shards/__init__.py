"""Models whose data lie in several places: each shard is a model of its own rows, evaluated where these are."""
