"""What the chat shows of what was said: nothing lost, nothing run."""

import pytest

from minivllm_ui.answering import AnswerStats
from minivllm_ui.conversation import Conversation, Conversations, Turn
from minivllm_ui.display import as_asked, details, literal, one_line, shown_messages, split_thinking, without_fence

STATS = AnswerStats("chat-1-2", 400, 388, 30, 0.010, 0.067, 0.8, 1, 27, 2048, "stop")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>c</b>", "a &lt;b>c&lt;/b>"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("AT&amp;T", "AT&amp;amp;T"),
        ("use `<br>` or <br>", "use `<br>` or &lt;br>"),
        ("```html\n<p>\n```\n<p>", "```html\n<p>\n```\n&lt;p>"),
        ("```\n<p>\nstill open", "```\n<p>\nstill open"),
        ("<script>x</script>", "&lt;script>x&lt;/script>"),
        ("a ` b <i> c", "a ` b &lt;i> c"),
    ],
)
def test_angle_brackets_outside_code_are_text(text: str, shown: str) -> None:
    assert literal(text) == shown


@pytest.mark.parametrize(
    "question",
    ["plain", "a <b> & &amp; c", "def f():\n    return `1`", "x\n\ty", "```py\n<p>\n```", "call __init__ now", "````\n  odd"],
)
def test_a_question_comes_back_from_an_edit_as_it_was(question: str) -> None:
    assert without_fence(as_asked(question)) == question


def test_code_in_a_question_is_fenced() -> None:
    assert as_asked("def f():\n    return 1") == "```text\ndef f():\n    return 1\n```"
    assert as_asked("hello there") == "hello there"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("plain", ("", "plain", False)),
        ("<think>\nhm", ("hm", "", True)),
        ("<think>\nhm\n</think>\n\nyes", ("hm", "yes", False)),
        ("opened in the prompt\n</think>\nyes", ("opened in the prompt", "yes", False)),
    ],
)
def test_thinking_is_told_from_the_answer(answer: str, expected: tuple[str, str, bool]) -> None:
    assert split_thinking(answer) == expected


def test_a_turn_as_messages() -> None:
    turns = [
        Turn("q", "<think>a</think>  b", "done", stats=STATS),
        Turn("empty", "", "done"),
        Turn("bad", "partly", "failed", error="it <failed>"),
        Turn("now", "", "running", progress="waiting, 3 ahead · 1 s"),
    ]
    messages, owners = shown_messages(turns)
    shown = [
        (one["role"], one["content"][0]["text"], one["metadata"].get("title"), one["metadata"].get("status")) for one in messages
    ]
    assert shown == [
        ("user", "q", None, None),
        ("assistant", "a", "Thinking", "done"),
        ("assistant", "  b", None, None),
        ("assistant", details(STATS), one_line(STATS), "done"),
        ("user", "empty", None, None),
        ("assistant", "_(an empty answer)_", None, None),
        ("user", "bad", None, None),
        ("assistant", "partly", None, None),
        ("assistant", "it &lt;failed>", "This answer failed; retry, or edit the question", None),
        ("user", "now", None, None),
        ("assistant", "", "waiting, 3 ahead · 1 s", "pending"),
    ]
    assert owners == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3]


def test_the_quiet_line_and_its_details() -> None:
    assert one_line(STATS) == "36.2 tok/s · TTFT 77 ms · 97 % of prompt cached · context 430 of 2048 · stop"
    assert "- prefill (prompt): 67 ms for 12 tokens, 179 tok/s" in details(STATS)
    unstarted = AnswerStats("chat-1-2", 5, 0, 0, None, None, None, 0, 1, 2048, "stopped")
    assert one_line(unstarted) == "– tok/s · TTFT – · 0 % of prompt cached · context 5 of 2048 · stopped"


def test_the_model_is_told_what_was_said() -> None:
    conversation = Conversation(4, [Turn(" a\n  b", "  c\n"), Turn("d")])
    assert conversation.messages("be kind") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": " a\n  b"},
        {"role": "assistant", "content": "  c\n"},
        {"role": "user", "content": "d"},
    ]
    assert conversation.messages(" ")[0]["role"] == "user"
    assert [conversation.next_request_id() for _ in range(2)] == ["chat-4-1", "chat-4-2"]
    assert conversation.drop_from(2) is None
    dropped = conversation.drop_from(0)
    assert dropped is not None
    assert dropped.question == " a\n  b"
    assert conversation.turns == []


def test_sessions_are_apart_and_the_oldest_are_forgotten() -> None:
    conversations = Conversations()
    first = conversations.of("a")
    first.running = object()  # type: ignore[assignment]  # being answered
    second = conversations.of("b")
    assert first is not second
    for number in range(600):
        conversations.of(f"other {number}")
    assert conversations.of("a") is first
    assert conversations.of("b") is not second
