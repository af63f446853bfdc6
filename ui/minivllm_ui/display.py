"""A conversation as the messages that Gradio's Chatbot shows. Pure functions; nothing shown is ever read back.

Content goes in Gradio's dictionary form: a plain string would lose its indentation. Angle brackets outside code are escaped, or
the page would take them for tags and drop them; scripts are inert either way, Gradio sanitises what is left.
"""

import re
from typing import Any

from minivllm_ui.answering import AnswerStats
from minivllm_ui.conversation import Turn

__all__ = ["as_asked", "details", "literal", "one_line", "shown_messages", "split_thinking", "without_fence"]

Shown = dict[str, Any]

_CODE = re.compile(
    r"(^ {0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}\2[`~]*[ \t]*$|\Z))|(?<!`)(`+)(?!`)(?:.+?)(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE
)
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_LOOKS_LIKE_CODE = re.compile(r"^(?:[ \t]{2,}\S|#include)|__\w+__|[{};][ \t]*$", re.MULTILINE)
_FENCED = re.compile(r"(`{3,})text\n(.*)\n\1", re.DOTALL)


def shown_messages(turns: list[Turn]) -> tuple[list[Shown], list[int]]:
    """The messages, and for each the index of its turn."""
    messages: list[Shown] = []
    owners: list[int] = []
    for index, turn in enumerate(turns):
        one_turn = _messages_of(turn)
        messages += one_turn
        owners += [index] * len(one_turn)
    return messages, owners


def split_thinking(answer: str) -> tuple[str, str, bool]:
    """What a model thought, what it answered, and whether it is still thinking. The opening tag may stand in the prompt."""
    before, closing, after = answer.partition("</think>")
    if closing:
        return before.removeprefix("<think>").strip("\n"), after.lstrip("\n"), False
    if answer.lstrip().startswith("<think>"):
        return answer.lstrip().removeprefix("<think>").strip("\n"), "", True
    return "", answer, False


def literal(text: str) -> str:
    """Markdown that shows every angle bracket and entity of ``text``; code spans and fences are left alone."""
    parts, last = [], 0
    for match in _CODE.finditer(text):
        parts += [_escaped(text[last : match.start()]), match[0]]
        last = match.end()
    return "".join([*parts, _escaped(text[last:])])


def as_asked(question: str) -> str:
    """Markdown that shows a question as it was typed: what looks like code and has no fence gets one."""
    if "```" in question or not _LOOKS_LIKE_CODE.search(question):
        return literal(question)
    longest = max((len(run) for run in re.findall(r"`+", question)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{question}\n{fence}"


def without_fence(edited: str) -> str:
    """The question in an edited :func:`as_asked`."""
    match = _FENCED.fullmatch(edited.strip("\n"))
    return match[2] if match else edited.replace("&lt;", "<").replace("&amp;", "&")


def one_line(stats: AnswerStats) -> str:
    """``38.2 tok/s · TTFT 77 ms · 97 % of prompt cached · context 412 of 2048 · stop``."""
    rate, first = stats.tokens_per_second, stats.first_token_seconds
    return " · ".join(
        [
            "– tok/s" if rate is None else f"{rate:.1f} tok/s",
            "TTFT –" if first is None else f"TTFT {_duration(first)}",
            f"{100 * stats.num_cached / max(1, stats.num_prompt):.0f} % of prompt cached",
            f"context {stats.context} of {stats.max_context}",
            stats.reason,
        ]
    )


def details(stats: AnswerStats) -> str:
    """What opens on a click."""
    computed = stats.num_prompt - stats.num_cached
    prefill = stats.prefill_seconds
    speed = f", {computed / prefill:.0f} tok/s" if prefill else ""
    times = {
        "waited in the queue": _duration(stats.queue_seconds),
        "prefill (prompt)": f"{_duration(prefill)} for {computed} tokens{speed}",
        "decode (answer)": f"{_duration(stats.decode_seconds)} for {stats.num_generated} tokens",
        "prompt": f"{stats.num_prompt} tokens, {stats.num_cached} of them from the prefix cache",
        "KV blocks": f"{stats.num_blocks}",
        "preempted": f"{stats.num_preemptions} times",
        "request": f"`{stats.request_id}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in times.items())


def _messages_of(turn: Turn) -> list[Shown]:
    shown = [_message("user", as_asked(turn.question))]
    thought, answer, is_thinking = split_thinking(turn.answer)
    is_running = turn.status == "running"
    if thought or is_thinking:
        status = "pending" if is_thinking and is_running else "done"
        shown.append(_message("assistant", literal(thought), title="Thinking", status=status))
    if answer:
        shown.append(_message("assistant", literal(answer)))
    elif not is_running and turn.status != "failed":
        shown.append(_message("assistant", "_(an empty answer)_"))
    if is_running:
        shown.append(_message("assistant", "", title=turn.progress or "sending", status="pending"))
    elif turn.status == "failed":
        shown.append(_message("assistant", literal(turn.error), title="This answer failed; retry, or edit the question"))
    if turn.stats is not None:
        shown.append(_message("assistant", details(turn.stats), title=one_line(turn.stats), status="done"))
    return shown


def _message(role: str, text: str, **metadata: str) -> Shown:
    return {"role": role, "content": [{"type": "text", "text": text}], "metadata": metadata}


def _escaped(text: str) -> str:
    return _TAG.sub("&lt;", _ENTITY.sub("&amp;", text))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
