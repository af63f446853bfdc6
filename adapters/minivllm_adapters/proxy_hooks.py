"""What a LiteLLM proxy needs beside the provider, as one of its ``callbacks``::

    litellm_settings:
      callbacks: ["minivllm_adapters.proxy_hooks.request_parameters"]

LiteLLM refuses the parameters of OpenAI's embeddings API for custom providers, and its proxy turns token ids into text with
another model's tokenizer. OpenAI's own client sends ``encoding_format`` with every call. A ``timeout`` in the request is not used
for streams, unless it is called ``stream_timeout``. Runs on the proxy's event loop, once a
request; requests for other providers' models are left alone. Imports LiteLLM.
"""

import importlib
from typing import Any

from litellm import constants
from litellm.integrations.custom_logger import CustomLogger

from minivllm_adapters.errors import PROVIDER

__all__ = ["RequestParameters", "request_parameters"]

MOVED = ("dimensions", "encoding_format", "user")
EMBEDDING_CALLS = ("embeddings", "aembedding", "embedding")


class RequestParameters(CustomLogger):
    """Carries parameters past LiteLLM's checks: of embeddings ``dimensions``, ``encoding_format`` and token ids, of streams
    ``timeout``."""

    def __init__(self) -> None:
        super().__init__()
        takes_token_ids = constants.LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS
        if PROVIDER not in takes_token_ids:
            takes_token_ids.append(PROVIDER)

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: Any, call_type: Any) -> Any:
        """Put them where LiteLLM hands them on as they are. None leaves the call as it came."""
        if not isinstance(data, dict) or not _is_ours(data.get("model")):
            return None
        if call_type in EMBEDDING_CALLS:
            moved = {name: data.pop(name) for name in MOVED if name in data}
            if moved:
                data["extra_body"] = {**(data.get("extra_body") or {}), **moved}
        elif data.get("stream") is True and data.get("timeout") is not None:
            data.setdefault("stream_timeout", data["timeout"])
        return data


def _is_ours(model: object) -> bool:
    """Whether every deployment under this public name is served here."""
    router = importlib.import_module("litellm.proxy.proxy_server").llm_router
    deployments = (router.get_model_list(model_name=model) if router is not None and isinstance(model, str) else None) or []
    names = [str(deployment["litellm_params"]["model"]) for deployment in deployments] or [str(model)]
    return all(name.startswith(f"{PROVIDER}/") for name in names)


request_parameters = RequestParameters()
