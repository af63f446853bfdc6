"""Every exception a user can meet, in one tree.

::

    MinivllmError
    ├── InvalidRequestError (ValueError)      the request can never be served as it stands
    │   ├── ContextWindowExceededError        prompt (+ completion) longer than the window or the pool
    │   └── UnsupportedFeatureError           understood, but this engine or this model does not have it
    ├── ConfigError (ValueError)              an engine setting is impossible
    ├── ModelError                            a model could not be found, fetched or read
    │   ├── ModelNotFoundError                no such name, directory or file
    │   ├── ModelDownloadError                the name is known, but its files could not be fetched
    │   ├── ModelLoadError                    files are missing, corrupt or incomplete
    │   └── UnsupportedModelError             architecture, rope kind, quantisation or tensor not supported
    ├── QueueFullError                        the waiting queue is at its limit; try again later
    │   └── RequestRejectedError              a policy refused the request; ``retry_after`` says when to come back
    ├── PluginError                           a plugin cannot be loaded, or failed while errors are to be raised
    ├── RequestFailedError                    this request alone failed (NaN logits, a failing plugin)
    ├── RequestAbortedError                   the request was aborted while somebody waited for its result
    ├── RequestTimeoutError (TimeoutError)    the caller's deadline passed; the request was aborted
    └── EngineError                           the engine cannot serve anybody
        ├── EngineDeadError                   its thread died; ``__cause__`` says of what
        ├── RankFailedError                   another process of a tensor-parallel engine ended
        └── EngineClosedError                 ``close()`` was called

Messages name the value, the limit and the remedy. Nothing here imports anything.
"""

__all__ = [
    "ConfigError",
    "ContextWindowExceededError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "InvalidRequestError",
    "MinivllmError",
    "ModelDownloadError",
    "ModelError",
    "ModelLoadError",
    "ModelNotFoundError",
    "PluginError",
    "QueueFullError",
    "RankFailedError",
    "RequestAbortedError",
    "RequestFailedError",
    "RequestRejectedError",
    "RequestTimeoutError",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
]


class MinivllmError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidRequestError(MinivllmError, ValueError):
    """The request is malformed or can never be served; nothing was queued."""


class ContextWindowExceededError(InvalidRequestError):
    """The prompt, or prompt plus completion, does not fit the window or the KV pool."""


class UnsupportedFeatureError(InvalidRequestError):
    """A parameter is understood but not supported by this engine or model."""


class ConfigError(MinivllmError, ValueError):
    """An engine setting is impossible; the message names field, value, limit and remedy."""


class ModelError(MinivllmError):
    """A model could not be found, fetched or read."""


class ModelNotFoundError(ModelError):
    """No catalog entry, directory or file answers to this name."""


class ModelDownloadError(ModelError):
    """The model is known, but its files could not be fetched."""


class ModelLoadError(ModelError):
    """Model files are missing, truncated, corrupt or incomplete."""


class UnsupportedModelError(ModelError):
    """The architecture, rope kind, quantisation or a tensor is not supported."""


class QueueFullError(MinivllmError):
    """The waiting queue is at its limit."""


class RequestRejectedError(QueueFullError):
    """A policy refused the request before it was queued. ``retry_after``: seconds, or None."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PluginError(MinivllmError):
    """A plugin cannot be loaded, or it failed in an engine with ``plugin_errors="raise"``. Names the plugin."""


class RequestFailedError(MinivllmError):
    """One request failed; its neighbours are not disturbed."""


class RequestAbortedError(MinivllmError):
    """The request was aborted before it ended by itself."""


class RequestTimeoutError(MinivllmError, TimeoutError):
    """The caller's deadline passed before the request ended; it was aborted."""


class EngineError(MinivllmError):
    """The engine cannot serve requests."""


class EngineDeadError(EngineError):
    """The engine thread died; ``__cause__`` carries the reason."""


class RankFailedError(EngineError):
    """Another process of a tensor-parallel engine ended; names the rank, how it ended and its last words."""


class EngineClosedError(EngineError):
    """The engine was closed."""
