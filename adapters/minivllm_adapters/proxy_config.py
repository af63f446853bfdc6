"""The configuration of a LiteLLM proxy that serves engines of this process: from settings to YAML. Pure but for :func:`write`.

Knows what LiteLLM's proxy must be told so that it is honest in front of one engine in its own process: no retries, no cooldown,
no health check that generates, and no request that goes on after its client has hung up.
"""

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm_adapters.errors import PROVIDER
from minivllm_plugin.errors import ConfigError

__all__ = ["MASTER_KEY_VARIABLE", "ProxySettings", "as_yaml", "is_loopback", "proxy_config", "random_key", "write"]

MASTER_KEY_VARIABLE = "LITELLM_MASTER_KEY"
PUBLIC_KEYS = ("sk-1234",)  # the key of every tutorial; LiteLLM does not start with it
EFFORTS = ["none", "minimal", "low", "medium", "high"]
FILE_NAME = "litellm_proxy.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """How a proxy is set up.

    Attributes:
        models: public name -> the model behind it; both are often the same.
        host, port: where it listens; port 0 takes a free one.
        master_key: what clients must send; None asks nobody, which is refused beyond loopback.
        max_parallel: requests that generate at a time; one more is answered 429.
        max_request_mb: size of a request's body in MiB; more is answered 413.
        timeout: seconds of a request that does not say itself how long it may take.
        drain_seconds: how long requests in progress may go on when the server is told to stop.
        metrics: ``/metrics`` is served; needs prometheus_client.

    Raises:
        ConfigError: a value is impossible; names it and what is allowed.
    """

    models: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 4000
    master_key: str | None = field(default=None, repr=False)
    max_parallel: int = 256
    max_request_mb: float = 10.0
    timeout: float = 600.0
    drain_seconds: float = 30.0
    metrics: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("give at least one model to serve")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be between 0 (a free one) and 65535, got {self.port}")
        if self.max_parallel < 1:
            raise ConfigError(f"max_parallel must be at least 1 request, got {self.max_parallel}")
        for name in ("max_request_mb", "timeout", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.master_key is None and not self.is_local:
            raise ConfigError(f"a server at {self.host} can be reached from other machines and needs a master key")
        if self.master_key is not None and (self.master_key in PUBLIC_KEYS or len(self.master_key.strip()) < 8):
            raise ConfigError("the master key is empty, shorter than 8 characters, or known from tutorials; take a random one")

    @property
    def is_local(self) -> bool:
        """Only programs of this machine reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address that other machines cannot reach. A name other than localhost is not looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def random_key() -> str:
    """A master key that nobody can guess."""
    return f"sk-{secrets.token_urlsafe(32)}"


def proxy_config(settings: ProxySettings, windows: Mapping[str, int] | None = None) -> dict[str, Any]:
    """LiteLLM's configuration as a dictionary. The master key is not in it, only the name of its environment variable.

    Args:
        windows: public name -> context window in tokens, of the models that are loaded.
    """
    callbacks = ["minivllm_adapters.proxy_hooks.request_parameters"]
    general: dict[str, Any] = {
        "cancel_on_disconnect": True,  # else a client that hangs up on a call without stream keeps the engine busy
        "background_health_checks": False,  # LiteLLM's health checks generate text
        "health_check_skip_disabled_background_models": True,
        "disable_model_info_refresh": True,
    }
    if settings.master_key is None:
        general["dangerously_permit_weak_or_unset_master_key"] = True
    else:
        general["master_key"] = f"os.environ/{MASTER_KEY_VARIABLE}"
    return {
        "model_list": [_deployment(name, model, (windows or {}).get(name)) for name, model in settings.models.items()],
        "litellm_settings": {
            "custom_provider_map": [{"provider": PROVIDER, "custom_handler": "minivllm_adapters.provider"}],
            "callbacks": [*callbacks, "prometheus"] if settings.metrics else callbacks,
            "request_timeout": settings.timeout,
        },
        # One engine a model, in this very process: nobody else could answer a second try, and a cooldown would refuse what
        # the engine could serve.
        "router_settings": {"num_retries": 0, "disable_cooldowns": True, "timeout": settings.timeout},
        "general_settings": general,
    }


def as_yaml(config: Mapping[str, Any]) -> str:
    """The text of the file."""
    import yaml  # type: ignore[import-untyped]  # LiteLLM brings it; it has no annotations

    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def write(config: Mapping[str, Any], folder: Path) -> Path:
    """Put the file into ``folder``, which is made if need be; returns its path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        path.write_text(as_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the proxy's configuration cannot be written to {folder}: {error}") from error
    return path.resolve()


def _deployment(name: str, model: str, window: int | None) -> dict[str, Any]:
    limits = {} if window is None else {"max_tokens": window, "max_input_tokens": window, "max_output_tokens": window}
    return {
        "model_name": name,
        "litellm_params": {"model": f"{PROVIDER}/{model}"},
        "model_info": {
            "mode": "chat",
            **limits,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "supports_function_calling": True,
            "supports_response_schema": True,
            "reasoning_effort_levels": EFFORTS,  # else LiteLLM refuses reasoning_effort
            "disable_background_health_check": True,
        },
    }
