"""Every parameter that a chat call may have, with values that are honoured, that change nothing and that are refused.

``test_parameter_matrix`` sends them all in every call style. The table in ``docs/litellm.md`` is made from it::

    python tests/support/parameter_matrix.py        # writes it into the page
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "litellm.md"
BEGIN, END = "<!-- parameters: made by tests/support/parameter_matrix.py -->", "<!-- /parameters -->"
NOTHING: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        honoured: values that change what the engine is asked for, or what is returned.
        neutral: values that are accepted and change nothing.
        refused: values that are a 400 naming the parameter.
        beside: further parameters that the honoured values need.
        note: for the page.
    """

    honoured: tuple[Any, ...] = NOTHING
    neutral: tuple[Any, ...] = NOTHING
    refused: tuple[Any, ...] = NOTHING
    beside: tuple[tuple[str, Any], ...] = ()
    note: str = ""


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOLS = (("tools", [TOOL]),)

OPENAI: dict[str, Row] = {
    "audio": Row(refused=({"voice": "alloy", "format": "wav"},), note="text only"),
    "frequency_penalty": Row((0.5,), (0,), (3,)),
    "function_call": Row(neutral=("auto", "none"), refused=({"name": "f"},), note="the API of 2023; use `tool_choice`"),
    "functions": Row(neutral=([],), refused=([{"name": "f"}],), note="the API of 2023; use `tools`"),
    "logit_bias": Row(({"5": 10},), ({},), ({"five": 1},)),
    "logprobs": Row((True,), (False,), (5,)),
    "max_completion_tokens": Row((3,), refused=(0,)),
    "max_tokens": Row((3,), refused=(0,)),
    "metadata": Row(neutral=({"trace": "1"},), note="for LiteLLM's callbacks; plugins get `request_metadata`"),
    "modalities": Row(neutral=(["text"],), refused=(["text", "audio"],)),
    "moderation": Row(refused=({"model": "x"},)),
    "n": Row((2,), (1,), (0, 129)),
    "parallel_tool_calls": Row((False,), (True,), ("yes",), beside=(*TOOLS, ("tool_choice", "required"))),
    "prediction": Row(refused=({"type": "content", "content": "x"},)),
    "presence_penalty": Row((-0.5,), (0,), (-3,)),
    "prompt_cache_key": Row(neutral=("k",), note="prefixes are found by their tokens"),
    "prompt_cache_options": Row(neutral=({"mode": "implicit"},)),
    "prompt_cache_retention": Row(neutral=("24h",)),
    "reasoning_effort": Row(("none", "high"), refused=("a lot",), note="see below"),
    "response_format": Row(({"type": "json_object"}, SCHEMA), ({"type": "text"},), ({"type": "xml"},)),
    "safety_identifier": Row(neutral=("s",)),
    "seed": Row((7,), refused=(-1,)),
    "service_tier": Row(neutral=("auto", "default"), refused=("flex",)),
    "stop": Row(("x", ["x", "y"]), ([],), ("",)),
    "store": Row(neutral=(False,), refused=(True,)),
    "stream": Row(neutral=(True, False), note="the same tokens"),
    "stream_options": Row(neutral=({"include_usage": True},), refused=({"continuous_usage_stats": True},), note="with `stream`"),
    "temperature": Row((0, 1.5), refused=(-1,)),
    "tool_choice": Row(("required", NAMED), ("auto",), ("sometimes",), beside=TOOLS),
    "tools": Row(([TOOL],), ([],), ([{"type": "web_search"}],)),
    "top_logprobs": Row((3,), (0,), (21,), beside=(("logprobs", True),)),
    "top_p": Row((0.5,), refused=(0,)),
    "user": Row(neutral=("somebody",)),
    "verbosity": Row(neutral=("medium",), refused=("high",)),
    "web_search_options": Row(refused=({},)),
}
OTHERS: dict[str, Row] = {
    "add_generation_prompt": Row((False,), refused=("no",)),
    "allowed_token_ids": Row(([4, 5],), refused=([],)),
    "bad_words": Row((["no"],), ([],), ([""],)),
    "best_of": Row(neutral=(1,), refused=(2,), note="honoured by `text_completion`, not streamed"),
    "cache_salt": Row(("tenant",), refused=("",)),
    "chat_template_kwargs": Row(({"enable_thinking": False},), refused=("no",)),
    "continue_final_message": Row((True,), refused=("yes",)),
    "detokenize": Row(neutral=(True,), refused=(False,)),
    "echo": Row(neutral=(False,), refused=(True,), note="honoured by `text_completion`, not streamed"),
    "extra_args": Row(({"ban": [3]},), ({},), ([3],)),
    "extra_headers": Row(neutral=({"x-trace": "1"},)),
    "guided_choice": Row((["yes", "no"],), refused=([],)),
    "guided_grammar": Row(('start: "a"',), refused=("",)),
    "guided_json": Row(({"type": "object"},), refused=("{",)),
    "guided_regex": Row(("[0-9]+",), refused=("",)),
    "ignore_eos": Row((True,), (False,), ("yes",)),
    "include_stop_str_in_output": Row((True,), (False,), ("yes",)),
    "length_penalty": Row(neutral=(1,), refused=(2,)),
    "logits_processors": Row(neutral=([],), refused=(["x"],), note="plugins bring theirs, `extra_args` names them"),
    "max_retries": Row(neutral=(3,)),
    "min_p": Row((0.1,), (0,), (2,)),
    "min_tokens": Row((2,), (0,), (-1,)),
    "num_retries": Row(neutral=(0,)),
    "priority": Row((3,), (0,), ("high",)),
    "prompt_logprobs": Row((2,), refused=(21,), note="whole chats only"),
    "prompt_token_ids": Row(refused=([1, 2],), note="honoured by `text_completion`"),
    "repetition_penalty": Row((1.2,), (1,), (0,)),
    "request_id": Row(("mine",), refused=("",)),
    "request_metadata": Row(({"tenant": "acme"},), refused=("acme",)),
    "skip_special_tokens": Row((False,), (True,), ("no",)),
    "stop_token_ids": Row(([7],), ([],), ([-1],)),
    "structured_outputs": Row(({"regex": "a+"},), ({},), ({"xml": "a"},)),
    "suffix": Row(neutral=("",), refused=("end",)),
    "thinking": Row(({"type": "disabled"}, {"type": "enabled", "budget_tokens": 64}), refused=("yes",), note="see below"),
    "thinking_token_budget": Row((64,), refused=(-1,)),
    "top_k": Row((5,), (0,), (-5,)),
    "use_beam_search": Row(neutral=(False,), refused=(True,)),
    "vllm_xargs": Row(({"ban": [3]},), refused=([3],), note="vLLM's name for `extra_args`"),
}


def table() -> str:
    """Both halves of the matrix as they stand in the page."""
    return f"{BEGIN}\n{_half('OpenAI', OPENAI)}\n\n{_half('others', OTHERS)}\n{END}"


def _half(title: str, rows: dict[str, Row]) -> str:
    head = f"| {title} | honoured | accepted, changes nothing | refused | |\n|---|---|---|---|---|"
    lines = [
        f"| `{name}` | {_cell(r.honoured)} | {_cell(r.neutral)} | {_cell(r.refused)} | {r.note} |" for name, r in rows.items()
    ]
    return "\n".join([head, *lines])


def _cell(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{_short(value)}`" for value in values)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return (text if len(text) <= 40 else f"{text[:37]}…").replace("|", "\\|")


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + table() + rest.split(END)[1], "utf-8")
