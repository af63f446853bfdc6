"""What each parameter that can reach the provider means here. Pure data: every name is honoured, neutral, ignored or refused.

LiteLLM forwards any keyword it does not know, so this table is the place where a typo, or a feature that the engine lacks,
is found out. A name that stands in none of these sets is unknown and is refused.
"""

from collections.abc import Mapping

from minivllm_adapters.format_params import FORMATS
from minivllm_adapters.prompt_params import CHAT_TEMPLATE, REASONING
from minivllm_adapters.report_params import REPORT
from minivllm_adapters.tool_params import TOOLS

__all__ = [
    "ADMISSION",
    "ALIASES",
    "HINTS",
    "IGNORED",
    "NEUTRAL_ONLY",
    "OPENAI",
    "SAMPLING",
    "SUPPORTED",
]

# Fields of SamplingParams under their own names.
SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "extra_args", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs", "n", "thinking_token_budget",
    }
)  # fmt: skip
# The second is what vLLM's server calls the parameters of its plugins.
ALIASES: Mapping[str, str] = {"max_completion_tokens": "max_tokens", "vllm_xargs": "extra_args"}

# How the request is queued. LiteLLM keeps ``metadata`` for itself, so what plugins are to see has a name of its own.
ADMISSION = frozenset({"request_id", "priority", "cache_salt", "request_metadata"})

SUPPORTED = SAMPLING | CHAT_TEMPLATE | ADMISSION | REPORT | REASONING | FORMATS | TOOLS | ALIASES.keys() | {"prompt_token_ids"}

# Accepted and without effect on the tokens, each for the reason beside it. Everything else that has no effect is refused.
IGNORED: Mapping[str, str] = {
    "stream": "chosen by the method that LiteLLM calls",
    "max_retries": "LiteLLM retries, around the provider",
    "num_retries": "LiteLLM retries, around the provider",
    "metadata": "for LiteLLM's callbacks",
    "user": "names the end user; nothing here differs by user",
    "safety_identifier": "names the end user to a hosted provider's abuse desk",
    "prompt_cache_key": "a routing hint between servers; the prefix cache finds shared prefixes by their tokens",
    "prompt_cache_options": "for a hosted cache; ours needs no options",
    "prompt_cache_retention": "a hosted cache's lifetime; ours keeps a prefix until its blocks are needed",
    "extra_headers": "there is no HTTP request to put them on",
}

# Accepted only with the value that changes nothing (None is always accepted); any other is refused until it is built.
NEUTRAL_ONLY: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Names from the OpenAI API: what LiteLLM's ``drop_params`` switch is allowed to drop.
OPENAI = frozenset(NEUTRAL_ONLY) - {"detokenize", "length_penalty", "logits_processors", "use_beam_search"}

# What to do instead, for names that people are likely to try.
HINTS: Mapping[str, str] = {
    "enable_thinking": "pass chat_template_kwargs={'enable_thinking': False} (or True)",
    "functions": "pass tools",
    "function_call": "pass tool_choice",
    "service_tier": "pass priority=… with scheduling_policy='priority'",
}
