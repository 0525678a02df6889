"""One record for each operation of a graph: all that readers of models know of it, or why not."""
