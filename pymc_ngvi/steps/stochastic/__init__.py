"""Step rules with fresh draws in every iteration, and those of the papers."""
