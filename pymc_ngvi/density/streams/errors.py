"""What can go wrong with data in batches."""


class BatchError(RuntimeError):
    """A batch can't be used: it could not be read, or is not what the model needs.

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun: ``approx.refine()`` goes on with the batch that failed.
    """

    approx: object = None
