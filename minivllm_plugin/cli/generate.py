"""``minivllm generate``: one prompt, one answer, streamed to stdout."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import InvalidRequestError

if TYPE_CHECKING:
    from minivllm_plugin import LLM, RequestOutput, RequestStream
    from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["generate"]

DEFAULT_MAX_TOKENS = 256


def generate(
    model: o.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")] = "-",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Through the chat template, or as it is. Default: chat if the model has one."),
    ] = None,
    system: o.System = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    max_tokens: o.MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    min_tokens: o.MinTokens = None,
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    ignore_eos: o.IgnoreEos = False,
    include_stop: o.IncludeStop = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
    num_blocks: o.NumBlocks = None,
    revision: o.Revision = None,
    plugin: o.Plugins = None,
    policy: o.Policies = None,
) -> None:
    """Complete one prompt and print the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = o.open_llm(
        model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        revision=revision,
        plugins=plugin,
        policies=policy,
    )
    try:
        params = o.sampling_params(
            llm,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids=stop_token_id,
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop,
        )
        output = _print_stream(_submit(llm, text, params, chat, system), quiet=as_json)
    finally:
        llm.close()
    if as_json:
        print(json.dumps(_record(output), ensure_ascii=False))


def _submit(llm: "LLM", text: str, params: "SamplingParams", chat: bool | None, system: str | None) -> "RequestStream":
    has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if chat if chat is not None else has_template:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return llm.submit_chat([*messages, {"role": "user", "content": text}], params)
    if system is not None:
        raise InvalidRequestError("--system needs the chat template: use --chat with a model that has one, or leave --system out")
    return llm.submit(text, params)


def _print_stream(stream: "RequestStream", *, quiet: bool) -> "RequestOutput":
    with stream:
        for delta in stream:
            if not quiet:
                print(delta.text, end="", flush=True)
        if not quiet:
            print()
        return stream.result()


def _record(output: "RequestOutput") -> dict[str, object]:
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
