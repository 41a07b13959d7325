"""The failures that a caller of Sterna can act on; every message says what to do."""


class SternaError(Exception):
    """The root of all errors that Sterna raises on purpose."""


class ConfigurationError(SternaError):
    """An option has a value that cannot work; the message names the option and the value."""


class ProtocolError(SternaError):
    """A state machine was given an event that is illegal in its state; nothing was changed."""


class TransportError(SternaError):
    """KV bytes could not be carried to the peer; the migration that needed them must abort."""


class UnknownInstanceError(SternaError):
    """No instance of the cluster has that id."""


class FleetError(SternaError):
    """An instance cannot be drained, started or replaced now; the message says why."""


class UnknownRequestError(SternaError):
    """No live request has that id."""


class InstanceStartError(SternaError):
    """An engine instance could not be started; the message carries the engine's own reason."""


class ModelPreparationError(SternaError):
    """The small model could not be fetched or converted; the message says what to do."""


class UnansweredError(SternaError):
    """Another actor died or did not answer in time; the message says which."""


class ImmovableError(SternaError):
    """A request could not be migrated; the message has the reason."""
