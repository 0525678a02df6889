"""What can go wrong with shards; each error says which shard, and what to do."""

from collections.abc import Hashable


class ShardError(RuntimeError):
    """A shard can't be used: its model could not be made or evaluated, or is not that of the others.

    Parameters
    ----------
    message : str
    key : hashable
        Of the shard.

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun.
    """

    def __init__(self, message: str, key: Hashable) -> None:
        super().__init__(message)
        self.key = key
        self.approx: object = None

    def __reduce__(self) -> tuple[type, tuple[str, Hashable]]:
        """Return what to pickle: errors cross processes."""
        return type(self), (str(self), self.key)


class BrokenExecutorError(RuntimeError):
    """The executor that evaluates shards, or the cluster that makes fits, can't be used any more.

    Parameters
    ----------
    message : str

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun: ``approx.refine(executor=...)`` goes on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.approx: object = None
