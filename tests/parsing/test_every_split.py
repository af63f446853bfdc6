"""Parsers give the same for every way in which a text is cut, swallow nothing, and find every call (trial C12)."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from minivllm_plugin.parsing.chat_output import ChatOutputParser
from minivllm_plugin.parsing.reasoning import ThinkParser
from minivllm_plugin.parsing.records import ToolCall, ToolCallDelta, ToolParser, collect_calls
from minivllm_plugin.parsing.tools import HermesToolParser, JsonToolParser

BLANK = " \t\r\n"
NAMES = ("f", "get_weather", 'say "hi"', "größe")
MAKERS: dict[str, Callable[[], ToolParser]] = {"hermes": HermesToolParser, "json": lambda: JsonToolParser(NAMES)}

BRACKETS = ("{", "}", "[", "]", '"', "\\", "\\\\", ",", ":", "mkdir {a,b")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
strings = st.lists(st.sampled_from([*BRACKETS, *TAGS, "\n", "é😀", "a", " "]), max_size=4).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from([0.5, -1e9]) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(strings, values, max_size=3)
layouts = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolCall, str]:
    """A call, and its object as a model may write it."""
    name, value, layout = draw(st.sampled_from(NAMES)), draw(arguments), draw(layouts)
    text = json.dumps(value, **layout)
    key, name_key = draw(st.sampled_from(["arguments", "parameters"])), draw(st.sampled_from(["name", "function"]))
    fields = [f'"{name_key}": {json.dumps(name)}', f'"{key}":{text}', *draw(st.sampled_from([[], ['"id": [1, {"x": "}"}]']]))]
    gap = draw(st.sampled_from(["", " ", "\n"]))
    return ToolCall(name, text), "{" + gap + f"{gap},{gap}".join(draw(st.permutations(fields))) + gap + "}"


plain = st.text(alphabet='ab<>/{}é \n"tool_cal', max_size=12).filter(lambda text: "<tool_call>" not in text)
cuts = st.lists(st.integers(0, 400), max_size=6)


def pieces(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    return [text[begin:end] for begin, end in pairwise(edges)]


def read(make: Callable[[], ToolParser], parts: Sequence[str]) -> tuple[str, list[ToolCall]]:
    parser = make()
    texts: list[str] = []
    deltas: list[ToolCallDelta] = []
    for part in parts:
        text, found = parser.feed(part)
        texts.append(text)
        deltas += found
    text, found = parser.finish()
    check_deltas([*deltas, *found])
    return "".join([*texts, text]), collect_calls([*deltas, *found])


def check_deltas(deltas: Sequence[ToolCallDelta]) -> None:
    """Indexes count up from 0, and each call is named once, in its first piece."""
    indexes = [delta.index for delta in deltas]
    assert indexes == sorted(indexes)
    assert set(indexes) == set(range(max(indexes, default=-1) + 1))
    for index in set(indexes):
        names = [delta.name for delta in deltas if delta.index == index]
        assert names[0]
        assert not any(names[1:])


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(plain, min_size=1, max_size=4), found=st.lists(calls(), min_size=3, max_size=3), places=cuts, tag=st.booleans()
)
def test_hermes_finds_every_call_and_keeps_all_text(
    texts: list[str], found: list[tuple[ToolCall, str]], places: list[int], tag: bool
) -> None:
    written = [texts[0]]
    expected = [texts[0]]
    for (_, body), text in zip(found, texts[1:], strict=False):
        written += [f"<tool_call>\n{body}\n</tool_call>" if tag else f"<tool_call>{body}</tool_call>", text]
        expected.append(text)
    # White space next to a call is dropped.
    for place in range(len(expected)):
        kept = expected[place].lstrip(BLANK) if place else expected[place]
        expected[place] = kept.rstrip(BLANK) if place < len(expected) - 1 else kept
    whole = "".join(written)
    assume(whole.count("<tool_call>") >= len(texts) - 1)
    result = read(HermesToolParser, [whole])
    assert result == ("".join(expected), [call for call, _ in found[: len(texts) - 1]])
    assert read(HermesToolParser, pieces(whole, places)) == result
    assert read(HermesToolParser, list(whole)) == result


@settings(max_examples=150, deadline=None)
@given(
    found=st.lists(calls(), min_size=1, max_size=3),
    places=cuts,
    form=st.sampled_from(["; ", "\n", "list", ""]),
    lead=st.sampled_from(["", " \n"]),
)
def test_json_finds_every_call(found: list[tuple[ToolCall, str]], places: list[int], form: str, lead: str) -> None:
    bodies = [body for _, body in found]
    whole = lead + ("[" + ", ".join(bodies) + "]" if form == "list" else form.join(bodies))
    result = read(MAKERS["json"], [whole])
    assert result == ("", [call for call, _ in found])
    assert read(MAKERS["json"], pieces(whole, places)) == result
    assert read(MAKERS["json"], list(whole)) == result


SCRAPS = (*BRACKETS, *TAGS, "<tool_call>\n", "<tool", " ", "\n", "w", '{"name":"f","arguments":')
fragments = st.one_of(
    calls().map(lambda call: call[1]),
    st.sampled_from(SCRAPS),
    st.integers(0, 99).map(lambda number: f" word{number} "),
)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(fragments, min_size=1, max_size=7), end=st.integers(0, 500), places=cuts, maker=st.sampled_from(sorted(MAKERS))
)
@example(['{"name":"f","arguments":{"a":]}} word1 '], 500, [], "json")
@example(['<tool_call>{"name":"f","arguments":{}word1 '], 500, [], "hermes")
@example(['{"name":"f","arguments":{}word1 '], 500, [], "json")
def test_broken_texts_do_not_depend_on_cuts_and_lose_no_word(parts: list[str], end: int, places: list[int], maker: str) -> None:
    whole = "".join(parts)[:end]
    result = read(MAKERS[maker], [whole])
    assert read(MAKERS[maker], pieces(whole, places)) == result
    assert read(MAKERS[maker], list(whole)) == result
    kept = result[0] + "".join(call.name + call.arguments for call in result[1])
    assert [word for word in re.findall(r"word\d+", whole) if word not in kept] == []


@pytest.mark.parametrize("maker", sorted(MAKERS))
@pytest.mark.parametrize(
    "text",
    [
        '{"name":"f","arguments":{"n":[{"x":1}],"s":"mkdir {a,b"}}',
        '{"arguments":{"b":"x\\"}"},"name":"f"}',
        '{"name":"f","arguments":{"a":"unfin',
        '{"name":"f","arg',
        '{"name":"f","arguments":"{\\"a\\": 2}"}',
        '{"name":"f","arguments":null}',
        '{"name":"f"}',
        '{"name": 3}',
        '{"x":1}',
        "",
    ],
)
def test_every_pair_of_cuts(maker: str, text: str) -> None:
    whole = f"<tool_call>\n{text}\n</tool_call>" if maker == "hermes" else text
    result = read(MAKERS[maker], [whole])
    for first in range(len(whole) + 1):
        for second in range(first, len(whole) + 1):
            assert read(MAKERS[maker], [whole[:first], whole[first:second], whole[second:]]) == result


@settings(max_examples=200, deadline=None)
@given(
    thought=st.text(alphabet="abc <>/think\n", max_size=15),
    answer=st.text(alphabet="abc <>/think\n", max_size=15),
    before=st.sampled_from(["", " ", "\n\n"]),
    is_open=st.booleans(),
    repeats=st.booleans(),
    closes=st.booleans(),
    places=cuts,
)
def test_reasoning_is_what_stands_between_the_tags(
    thought: str, answer: str, before: str, is_open: bool, repeats: bool, closes: bool, places: list[int]
) -> None:
    assume("think>" not in thought and "think>" not in answer and not thought.strip(BLANK).endswith("<"))
    opened = is_open or repeats
    whole = (before + "<think>" if repeats else "") + (thought + "</think>" + answer if closes and opened else thought)
    expected = (thought.strip(BLANK), answer.lstrip(BLANK) if closes else "") if opened else ("", thought)
    for parts in ([whole], list(whole), pieces(whole, places)):
        parser = ThinkParser(is_open=is_open)
        deltas = [*(parser.feed(part) for part in parts), parser.finish()]
        assert ("".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)) == expected


@settings(max_examples=150, deadline=None)
@given(
    thought=strings.filter(lambda text: "<think>" not in text and "</think>" not in text),
    text=plain,
    found=st.lists(calls(), max_size=2),
    end=st.integers(0, 900),
    places=cuts,
)
def test_an_answer_with_everything(
    thought: str, text: str, found: list[tuple[ToolCall, str]], end: int, places: list[int]
) -> None:
    whole = f"<think>{thought}</think>\n{text}" + "".join(f"\n<tool_call>{body}</tool_call>" for _, body in found)

    def answer(parts: Sequence[str]) -> tuple[str, str, list[ToolCall], int]:
        parser = ChatOutputParser(ThinkParser(), HermesToolParser())
        deltas = [*(parser.feed(part) for part in parts), parser.finish()]
        calls = collect_calls([call for delta in deltas for call in delta.calls])
        return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas), calls, parser.num_calls

    expected_text = text.lstrip(BLANK)
    expected_text = expected_text.rstrip(BLANK) if found else expected_text
    assert answer([whole]) == (thought.strip(BLANK), expected_text, [call for call, _ in found], len(found))
    cut = whole[:end]
    result = answer([cut])
    assert answer(list(cut)) == answer(pieces(cut, places)) == result
    once = ChatOutputParser(ThinkParser(), HermesToolParser()).parse(cut)
    assert (once.reasoning, once.text, once.calls) == result[:3]


def test_parsers_that_are_missing_leave_their_part_in_the_text() -> None:
    whole = '<think>x</think>y<tool_call>{"name":"f"}</tool_call>'
    assert ChatOutputParser().parse(whole) == ("", whole, [])
    assert ChatOutputParser().is_plain
    assert ChatOutputParser(reasoning=ThinkParser()).parse(whole).reasoning == "x"
    assert ChatOutputParser(tools=HermesToolParser()).parse(whole) == ("", "<think>x</think>y", [ToolCall("f", "{}")])


@pytest.mark.parametrize("maker", sorted(MAKERS))
def test_hostile_texts_raise_nothing(maker: str) -> None:
    open_tag = "<tool_call>" if maker == "hermes" else ""
    deep: dict[str, Any] = {
        "brackets in the arguments": '{"name":"f","arguments":{"a":' + "[" * 20_000,
        "brackets in another key": '{"name":"f","x":' + "[" * 20_000 + "]" * 20_000 + "}",
        "half a character as a name": '{"name":"\\ud800","arguments":"\\udfff"}',
        "a number without end": '{"name":"f","x":' + "9" * 10_000 + ',"arguments":{}}',
        "tags": "<tool_call>" * 2_000,
        "zero bytes": '{"name":"f\\u0000","arguments":{"\x00":1}}',
    }
    for what, text in deep.items():
        rest, found = read(MAKERS[maker], [open_tag + text])
        (rest + "".join(call.name + call.arguments for call in found)).encode()
        assert rest or found, what
