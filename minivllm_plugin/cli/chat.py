"""``minivllm chat``: a conversation on a terminal, or one turn per line from a pipe."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import EngineError, MinivllmError

if TYPE_CHECKING:
    from minivllm_plugin import LLM
    from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["Conversation", "chat"]

HELP = "/system TEXT sets the system prompt, /clear forgets the conversation, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer"


def chat(
    model: o.Model = "smollm2-135m",
    system: o.System = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    max_model_len: o.MaxModelLen = None,
    num_blocks: o.NumBlocks = None,
    revision: o.Revision = None,
    plugin: o.Plugins = None,
    policy: o.Policies = None,
) -> None:
    """Talk to a model. Commands inside: /system TEXT, /clear, /exit, /help."""
    llm = o.open_llm(
        model,
        dtype=dtype,
        device=device,
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
            stop=stop,
        )
        interactive = sys.stdin.isatty()
        if interactive:
            o.say(f"{llm.model_name}, {llm.max_model_len} tokens of context. {HELP}")
        Conversation(llm, params, interactive, system).run()
    finally:
        llm.close()


@dataclass
class Conversation:
    """The messages so far and the loop over turns. Lives on the main thread."""

    llm: "LLM"
    params: "SamplingParams"
    interactive: bool
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Read turns until the input ends or /exit."""
        while (line := self._read()) is not None:
            command, _, argument = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                return
            if command == "/clear":
                self.turns.clear()
                o.say("the conversation is empty")
            elif command == "/system":
                self.system = argument.strip() or None
                self.turns.clear()
                o.say(
                    "new system prompt, the conversation is empty"
                    if self.system
                    else "no system prompt, the conversation is empty"
                )
            elif command.startswith("/"):
                o.say(HELP if command == "/help" else f"unknown command {command!r}. {HELP}")
            elif line.strip():
                self._answer(line)

    def _read(self) -> str | None:
        if not self.interactive:
            return sys.stdin.readline() or None
        _enable_line_editing()
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                o.say("/exit or Ctrl-D leaves")

    def _answer(self, text: str) -> None:
        """One turn. A refused or failed request leaves the conversation as it was; a dead engine ends the program."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages += [*self.turns, {"role": "user", "content": text.rstrip("\n")}]
        try:
            answer = self._stream(messages)
        except EngineError:
            raise
        except MinivllmError as error:
            if not self.interactive:
                raise
            o.say(f"{error}. /clear empties the conversation")
            return
        self.turns += [messages[-1], {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        started = time.perf_counter()
        first = last = started
        num_tokens = 0
        stopped = False
        with self.llm.submit_chat(messages, self.params) as stream:
            try:
                for delta in stream:
                    print(delta.text, end="", flush=True)
                    last = time.perf_counter()
                    first = last if num_tokens == 0 else first
                    num_tokens += len(delta.token_ids)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                stopped = True
            stream.close()
            output = stream.output
        print()
        if self.interactive:
            speed = f"{(num_tokens - 1) / (last - first):.1f} tok/s" if num_tokens > 1 and last > first else "-"
            note = "stopped, " if stopped else ""
            o.say(
                f"[{note}{num_tokens} tokens, {speed}, first after {first - started:.2f} s, "
                f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached]"
            )
        return output.outputs[0].text


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # importing it gives input() history and cursor keys
    except ImportError:  # not on every platform
        return
