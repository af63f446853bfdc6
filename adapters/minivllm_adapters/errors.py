"""Our exceptions as LiteLLM's: one table, one function. Runs on the caller's thread; never on the engine's.

LiteLLM passes its own exception classes through unchanged and turns every other one into ``APIConnectionError``, which its
retry logic reads as a network fault. So nothing but these classes leaves the adapter::

    ContextWindowExceededError  -> litellm.ContextWindowExceededError   400
    UnsupportedFeatureError     -> litellm.UnsupportedParamsError       400 (a BadRequestError)
    InvalidRequestError         -> litellm.BadRequestError              400
    ConfigError                 -> litellm.BadRequestError              400
    UnsupportedModelError       -> litellm.BadRequestError              400
    ModelNotFoundError          -> litellm.NotFoundError                404
    RequestTimeoutError         -> litellm.Timeout                      408
    QueueFullError              -> litellm.RateLimitError               429
    RequestRejectedError        -> litellm.RateLimitError               429, with a Retry-After header if the policy named a time
    ModelError (the others)     -> litellm.ServiceUnavailableError      503, the model is not there (yet)
    EngineClosedError           -> litellm.ServiceUnavailableError      503
    RequestFailedError, RequestAbortedError, EngineError, anything else -> litellm.InternalServerError  500
"""

import math
from collections.abc import Mapping
from typing import Any

from minivllm_plugin import errors

__all__ = ["PROVIDER", "AutoloadError", "LiteLLMUnavailableError", "litellm_error"]

PROVIDER = "minivllm"

LITELLM_NAMES: Mapping[type[BaseException], str] = {
    errors.ContextWindowExceededError: "ContextWindowExceededError",
    errors.UnsupportedFeatureError: "UnsupportedParamsError",
    errors.InvalidRequestError: "BadRequestError",
    errors.ConfigError: "BadRequestError",
    errors.UnsupportedModelError: "BadRequestError",
    errors.ModelNotFoundError: "NotFoundError",
    errors.RequestTimeoutError: "Timeout",
    errors.QueueFullError: "RateLimitError",
    errors.ModelError: "ServiceUnavailableError",
    errors.EngineClosedError: "ServiceUnavailableError",
    BaseException: "InternalServerError",
}


class LiteLLMUnavailableError(errors.MinivllmError, ImportError):
    """LiteLLM is not installed, or its version cannot carry this provider."""


class AutoloadError(errors.MinivllmError, OSError):
    """The autoload file cannot be written or removed, or somebody else's file is in its place."""


def litellm_error(error: Exception, model: str) -> Exception:
    """The exception to raise instead of ``error``; raise it ``from error`` so that the cause stays visible.

    Args:
        error: whatever the engine, the registry or this adapter raised. One of LiteLLM's own classes is returned as it is.
        model: the model's name without the provider prefix, for the exception's ``model`` field.
    """
    import litellm
    from litellm.exceptions import LITELLM_EXCEPTION_TYPES

    if isinstance(error, tuple(LITELLM_EXCEPTION_TYPES)):
        return error
    name = next(LITELLM_NAMES[cls] for cls in type(error).__mro__ if cls in LITELLM_NAMES)
    make: Any = getattr(litellm, name)
    if isinstance(error, errors.RequestRejectedError) and error.retry_after is not None:
        return _come_back_later(make, error, error.retry_after, model)
    return make(message=_message(error), model=model, llm_provider=PROVIDER)  # type: ignore[no-any-return]  # by name


def _come_back_later(make: Any, error: Exception, seconds: float, model: str) -> Exception:
    """A RateLimitError that says when. LiteLLM's Router reads the response's header before it retries, its proxy sends
    ``headers`` on to the client; ``retry_after`` is for programs that catch it."""
    import httpx

    headers = {"retry-after": str(max(1, math.ceil(seconds)))}  # whole seconds by RFC 9110
    response = httpx.Response(429, headers=headers, request=httpx.Request("POST", "http://localhost"))
    made: Any = make(message=_message(error), model=model, llm_provider=PROVIDER, response=response)
    made.headers, made.retry_after = headers, seconds
    return made  # type: ignore[no-any-return]  # by name


def _message(error: Exception) -> str:
    """Our own messages are written for users; a foreign exception's is given with its class, and with its cause if it has one."""
    text = str(error) or type(error).__name__
    if not isinstance(error, errors.MinivllmError):
        return f"unexpected {type(error).__name__} in the minivllm provider: {text}"
    cause = error.__cause__
    return text if cause is None or str(cause) in text else f"{text} (cause: {type(cause).__name__}: {cause})"
