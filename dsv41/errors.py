"""Every error that this package raises on purpose.

All are `ValueError`s, since all say that something given to us cannot be used. Each message names the value,
what was expected, and what to do; nothing has been changed when one is raised.
"""


class Dsv41Error(ValueError):
    """Base of all errors below."""


class ConfigError(Dsv41Error):
    """A model configuration or layer schedule that cannot be built."""


class CheckpointError(Dsv41Error):
    """A checkpoint file or tensor that is missing, broken or of another format."""


class BackendError(Dsv41Error):
    """A backend that is unknown, cannot run here, or cannot serve the request."""


class LayoutError(Dsv41Error):
    """A cache, record or dtype name that does not fit what reads it."""


class InputError(Dsv41Error):
    """Tensors or batch arrays of wrong shape, dtype, device or content."""


class RequestError(Dsv41Error):
    """A request that is unknown, freed, or asked to go where it cannot."""


class TransferError(Dsv41Error):
    """A request's file that is broken, untrustworthy, or of another format or model."""


class PoolExhausted(Dsv41Error):
    """Not enough free pages; the step was refused whole and can be retried after a free."""
