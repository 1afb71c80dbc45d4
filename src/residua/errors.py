"""What can go wrong, one class for each kind of cause: the arguments, a route, the machine, the model."""


class ResiduaError(Exception):
    """Base of every error that Residua raises on purpose."""


class InputError(ResiduaError, ValueError):
    """An argument is not what is wanted; the message says what was given and the way out."""


class RouteError(ResiduaError, ValueError):
    """A partition or route contradicts itself or the tensors it is used with."""


class BackendError(ResiduaError, RuntimeError):
    """No backend takes the call, or the one that was asked for cannot; the message lists every reason."""


class IntegrationError(ResiduaError, RuntimeError):
    """A model or a version of a library that Residua cannot attach itself to."""
