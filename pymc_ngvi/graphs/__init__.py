"""The graphs of a model: how they are built, rewritten, compiled, and what they cost."""
