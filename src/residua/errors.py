"""The errors that Residua raises, one class for each kind of cause: arguments, route, machine, model."""


class ResiduaError(Exception):
    """Base of every error that Residua raises on purpose."""


class InputError(ResiduaError, ValueError):
    """An argument is not valid; the message says what was given, what is wanted and what to do."""


class RouteError(ResiduaError, ValueError):
    """A partition or route contradicts itself or the tensors it is used with."""


class BackendError(ResiduaError, RuntimeError):
    """No backend takes the call, or the one that was asked for cannot; the message lists every reason."""


class IntegrationError(ResiduaError, RuntimeError):
    """A model or a version of a library that Residua cannot attach itself to."""
