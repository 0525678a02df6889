"""Keep pytest from importing the benchmark scripts, whose rivals are optional to install."""

collect_ignore_glob = ["*.py"]
