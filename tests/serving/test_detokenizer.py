"""Incremental text: characters split over tokens (trial C04), stop strings (C01), min_tokens (C03), batching."""

import itertools
from collections.abc import Sequence

import pytest
import toy_tokenizers as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.detokenizer import Detokenizer, TextDelta
from minivllm_plugin.serving.tokenizer import Tokenizer

MIXED = "ďábel 🌶 שלום"
BYTES = Tokenizer(toys.byte_per_token())
LETTERS = Tokenizer(toys.letter_groups())
ABC, DEF, AB, X, END = range(5)
FAMILIES = {
    "byte per token": BYTES,
    "byte-level BPE": Tokenizer(toys.trained_byte_level()),
    "sentencepiece": Tokenizer(toys.sentencepiece()),
    "sentencepiece, no strip": Tokenizer(toys.sentencepiece(strip=False)),
    "metaspace": Tokenizer(toys.unigram()),
    "wordpiece": Tokenizer(toys.wordpiece()),
    "no decoder": Tokenizer(toys.words()),
}


def run(
    tokenizer: Tokenizer | None,
    batches: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (),
    end_reason: str = "length",
    stop_token: int | None = None,
) -> tuple[str, int, str | None, list[TextDelta]]:
    """Feed the batches and finish, as a stream does; text, number of tokens kept, stop string, deltas."""
    detokenizer = Detokenizer(tokenizer, params or SamplingParams(), list(prompt))
    deltas: list[TextDelta] = []
    for batch in batches:
        deltas.append(detokenizer.feed(batch))
        assert detokenizer.text == "".join(delta.text for delta in deltas)
        if deltas[-1].stop_reason is not None:
            break
    deltas.append(detokenizer.finish(end_reason, stop_token))
    assert detokenizer.text == "".join(delta.text for delta in deltas)
    assert detokenizer.stop_reason == deltas[-1].stop_reason
    return detokenizer.text, sum(delta.num_tokens for delta in deltas), detokenizer.stop_reason, deltas


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


# --- characters split over tokens (C04) ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", range(len(MIXED.encode()) + 1))
def test_no_delta_holds_half_a_character_at_any_split(split: int) -> None:
    ids = BYTES.encode(MIXED)
    text, num_tokens, _, deltas = run(BYTES, [ids[:split], ids[split:]])
    assert text == MIXED
    assert num_tokens == len(ids)
    assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("cut", range(len(MIXED.encode()) + 1))
def test_cut_by_max_tokens_flushes_the_rest_once(cut: int) -> None:
    ids = BYTES.encode(MIXED)[:cut]
    text, _, _, deltas = run(BYTES, one_by_one(ids))
    assert text == MIXED.encode()[:cut].decode(errors="replace") == BYTES.decode(ids)
    assert text.count("\ufffd") <= 1
    assert not any("\ufffd" in delta.text for delta in deltas[:-1])


def test_an_invalid_byte_in_the_middle_becomes_one_mark_and_loses_nothing() -> None:
    lead, continuation = BYTES.encode("é")
    ids = [*BYTES.encode("ab"), lead, *BYTES.encode(" c"), continuation, continuation, *BYTES.encode("d")]
    text, _, _, _ = run(BYTES, one_by_one(ids))
    assert text == "ab\ufffd c\ufffd\ufffdd"


def test_bytes_that_can_never_be_completed_are_not_held_back() -> None:
    continuation = BYTES.encode("é")[1]
    detokenizer = Detokenizer(BYTES, SamplingParams(), [])
    assert [detokenizer.feed([continuation]).text for _ in range(3)] == ["\ufffd"] * 3


def test_interleaved_requests_do_not_mix() -> None:
    first, second = BYTES.encode("🌶🌶"), BYTES.encode("שלום")
    streams = [Detokenizer(BYTES, SamplingParams(), []) for _ in range(2)]
    for left, right in zip(first, second, strict=True):
        streams[0].feed([left])
        streams[1].feed([right])
    assert [stream.text for stream in streams] == ["🌶🌶", "שלום"]


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    lead, continuation = BYTES.encode("é")
    special = min(BYTES.special_ids)
    assert run(BYTES, one_by_one([lead, special, continuation]))[0] == "é"


def test_special_tokens_are_kept_on_request() -> None:
    ids = BYTES.encode("a<|im_end|>b")
    assert run(BYTES, one_by_one(ids))[0] == "ab"
    assert run(BYTES, one_by_one(ids), SamplingParams(skip_special_tokens=False))[0] == "a<|im_end|>b"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert run(BYTES, [[*BYTES.encode("a"), 10**6, 2**40, *BYTES.encode("b")]])[0] == "ab"


@pytest.mark.parametrize(("prompt", "expected"), [("", "Hello"), ("<s>", "Hello"), ("Hello", " Hello"), ("<s>Hello", " Hello")])
def test_the_leading_space_depends_on_the_prompt(prompt: str, expected: str) -> None:
    for name in ("sentencepiece", "metaspace"):
        tokenizer = FAMILIES[name]
        hello = tokenizer._backend.token_to_id("▁Hello")
        assert hello is not None
        assert run(tokenizer, [[hello]], prompt=tokenizer.encode(prompt))[0] == expected, name


def test_wordpiece_continues_the_last_word_of_the_prompt() -> None:
    tokenizer = FAMILIES["wordpiece"]
    prompt, rest = tokenizer.encode("hello"), tokenizer.encode("goods bye")[1:]
    assert run(tokenizer, one_by_one(rest), prompt=prompt)[0] == "s bye"


def test_a_prompt_that_ends_within_a_character_keeps_the_cut_to_itself() -> None:
    lead, continuation = BYTES.encode("é")
    text, _, _, _ = run(BYTES, [[continuation, *BYTES.encode("x")]], prompt=[lead])
    assert text == BYTES.decode([continuation, *BYTES.encode("x")])


@st.composite
def tokens_in_batches(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    ids = draw(st.lists(st.integers(0, FAMILIES[name].vocab_size + 2), max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return name, [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]


@settings(max_examples=400, deadline=None)
@given(case=tokens_in_batches(), skip=st.booleans())
def test_joined_deltas_equal_decode_for_any_tokens_in_any_batches(case: tuple[str, list[list[int]]], skip: bool) -> None:
    name, batches = case
    tokenizer, ids = FAMILIES[name], [token_id for batch in batches for token_id in batch]
    params = SamplingParams(skip_special_tokens=skip)
    text, num_tokens, _, _ = run(tokenizer, batches, params)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert num_tokens == len(ids)
    assert text == run(tokenizer, one_by_one(ids), params)[0]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["sentencepiece", "sentencepiece, no strip", "byte-level BPE", "wordpiece", "no decoder"]),
    data=st.data(),
)
def test_text_continues_the_prompt_as_decoding_both_together_does(name: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[name]
    word_lists = {"no decoder": ["", "one", "two one"], "wordpiece": ["", "hello", "goods bye", "worlds . bye"]}
    texts = st.sampled_from(word_lists[name]) if name in word_lists else st.text("abc lo<>s/|", max_size=12)
    prompt = tokenizer.encode(data.draw(texts))
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False)
    text, _, _, _ = run(tokenizer, one_by_one(ids), prompt=prompt)
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


# --- stop strings (C01, C03) -----------------------------------------------------------------------------------------


def test_a_stop_string_inside_one_token() -> None:
    text, num_tokens, reason, deltas = run(LETTERS, [[ABC], [DEF], [X]], SamplingParams(stop="DE"))
    assert (text, num_tokens, reason) == ("ABC", 2, "DE")
    assert not any("D" in delta.text for delta in deltas)


def test_a_stop_string_across_two_tokens() -> None:
    text, num_tokens, reason, deltas = run(LETTERS, [[ABC], [DEF]], SamplingParams(stop="CD"))
    assert (text, num_tokens, reason) == ("AB", 2, "CD")
    assert [delta.text for delta in deltas] == ["AB", "", ""]


@pytest.mark.parametrize(("end_reason", "stop_token"), [("stop", END), ("length", None), ("abort", None), ("error", None)])
def test_held_text_is_released_whatever_the_end(end_reason: str, stop_token: int | None) -> None:
    params = SamplingParams(stop="XYZ")
    text, _, reason, deltas = run(LETTERS, [[AB], [X]], params, end_reason=end_reason, stop_token=stop_token)
    assert (text, reason) == ("ABX", None)
    assert [delta.text for delta in deltas] == ["AB", "", "X"]
    assert deltas[-1].num_tokens == (stop_token is not None)


def test_the_earliest_match_wins_not_the_first_in_the_list() -> None:
    assert run(LETTERS, [[ABC, DEF]], SamplingParams(stop=["F", "DE"]))[:3] == ("ABC", 2, "DE")
    assert run(LETTERS, [[ABC, DEF]], SamplingParams(stop=["EF", "CDEF"]))[:3] == ("AB", 2, "CDEF")


def test_the_match_that_completes_first_wins() -> None:
    """Reading ABCDEF character by character, DE is complete before CDEF is."""
    assert run(LETTERS, [[ABC, DEF]], SamplingParams(stop=["CDEF", "DE"]))[:3] == ("ABC", 2, "DE")


def test_include_stop_keeps_the_match_and_nothing_behind_it() -> None:
    params = SamplingParams(stop="DE", include_stop_str_in_output=True)
    assert run(LETTERS, [[ABC], [DEF], [X]], params)[:3] == ("ABCDE", 2, "DE")


def test_only_a_possible_beginning_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=["</tool>", "END"]), [])
    deltas = [detokenizer.feed([token_id]).text for token_id in BYTES.encode("a<b</toy ENE")]
    assert deltas == ["a", "", "<b", "", "", "", "", "</toy", " ", "", "", "EN"]
    assert detokenizer.finish("length").text == "E"


def test_several_stop_strings_in_one_token_and_in_one_batch() -> None:
    assert run(LETTERS, [[ABC, ABC, DEF]], SamplingParams(stop=["B", "C"]))[:3] == ("A", 1, "B")


def test_nothing_comes_after_the_stop() -> None:
    detokenizer = Detokenizer(LETTERS, SamplingParams(stop="C"), [])
    assert detokenizer.feed([AB, ABC, X]) == TextDelta("ABAB", 2, "C")
    assert detokenizer.feed([X]) == TextDelta("", 0, "C")
    assert detokenizer.finish("stop") == TextDelta("", 0, "C")


def test_finish_is_final() -> None:
    detokenizer = Detokenizer(LETTERS, SamplingParams(stop="XY"), [])
    detokenizer.feed([X])
    assert detokenizer.finish("length").text == "X"
    assert detokenizer.finish("length") == detokenizer.feed([ABC]) == TextDelta("", 0)
    assert detokenizer.text == "X"


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("", 1, "A")), (1, ("", 1, "A")), (2, ("AB", 2, "A")), (3, ("ABABC", 3, "A")), (4, ("ABABCABX", 4, None))],
)
def test_min_tokens_protects_from_stop_strings(min_tokens: int, expected: tuple[str, int, str | None]) -> None:
    params = SamplingParams(stop="A", min_tokens=min_tokens)
    assert run(LETTERS, [[AB, ABC], [AB], [X]], params)[:3] == expected


def test_a_match_that_token_min_tokens_completes_counts_though_it_began_before() -> None:
    assert run(LETTERS, [[ABC], [DEF]], SamplingParams(stop="CD", min_tokens=2))[:3] == ("AB", 2, "CD")


def test_text_of_a_stop_token_only_on_request() -> None:
    for include, expected in ((False, "AB"), (True, "ABX")):
        params = SamplingParams(stop_token_ids=[X], include_stop_str_in_output=include)
        text, num_tokens, reason, _ = run(LETTERS, [[AB]], params, end_reason="stop", stop_token=X)
        assert (text, num_tokens, reason) == (expected, 2, None)


def test_an_end_token_shows_only_with_special_tokens_kept_and_stops_included() -> None:
    for skip, include, expected in ((True, True, "AB"), (False, False, "AB"), (False, True, "AB<end>")):
        params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
        assert run(LETTERS, [[AB]], params, end_reason="stop", stop_token=END)[0] == expected


def test_a_stop_string_of_split_characters() -> None:
    ids = BYTES.encode("až🌶b")
    assert run(BYTES, one_by_one(ids), SamplingParams(stop="🌶"))[:3] == ("až", 7, "🌶")


def test_a_stop_string_that_only_the_flush_completes() -> None:
    lead = BYTES.encode("é")[:1]
    assert run(BYTES, [BYTES.encode("ab"), lead], SamplingParams(stop="b\ufffd"))[:3] == ("a", 3, "b\ufffd")


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert run(None, [[1, 2], [3]], stop_token=4, end_reason="stop")[:3] == ("", 4, None)


def naive(text_after_token: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Read character by character; at the first where a stop string ends, cut before the longest that does."""
    done = 0
    for count, text in enumerate(text_after_token, 1):
        for end in range(done + 1, len(text) + 1):
            matches = [string for string in stop if text[:end].endswith(string)]
            if matches and count >= min_tokens:
                longest = max(matches, key=len)
                return text[: end - len(longest)], count, longest
        done = len(text)
    return text_after_token[-1] if text_after_token else "", len(text_after_token), None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([ABC, DEF, AB, X]), max_size=12),
    stop=st.lists(st.text("ABCDEX", min_size=1, max_size=4), min_size=1, max_size=4),
    min_tokens=st.integers(0, 5),
    data=st.data(),
)
def test_stop_strings_equal_the_naive_search_for_every_batching(
    pieces: list[int], stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=4)))
    batches = [pieces[start:end] for start, end in itertools.pairwise([0, *cuts, len(pieces)])]
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=None)
    expected = naive([LETTERS.decode(pieces[: end + 1]) for end in range(len(pieces))], stop, min_tokens)
    assert run(LETTERS, batches, params)[:3] == expected
    assert run(LETTERS, one_by_one(pieces), params)[:3] == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abžš🌶", max_size=12),
    stop=st.lists(st.text("abžš🌶", min_size=1, max_size=3), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_stop_does_not_depend_on_where_token_edges_fall(text: str, stop: list[str], data: st.DataObject) -> None:
    params = SamplingParams(stop=stop)
    ids = BYTES.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    batches = [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    expected = naive([text[: end + 1] for end in range(len(text))], stop, 0)
    result = run(BYTES, batches, params)
    assert (result[0], result[2]) == (expected[0], expected[2])


def test_cost_grows_with_the_number_of_tokens_only() -> None:
    """No re-decoding: the library is never called once the pieces are known (counted, not timed)."""
    ids = BYTES.encode("hello world " * 200)
    run(BYTES, one_by_one(ids))
    calls = itertools.count()
    original = BYTES._pieces.piece
    BYTES._pieces.piece = lambda token_id: (next(calls), original(token_id))[1]  # type: ignore[method-assign]
    try:
        run(BYTES, one_by_one(ids))
    finally:
        del BYTES._pieces.piece
    assert next(calls) <= 1


def test_a_window_stays_short() -> None:
    tokenizer = FAMILIES["wordpiece"]
    stream = tokenizer.text_stream()
    for token_id in tokenizer.encode("hello worlds good bye . ") * 50:
        stream.push(token_id)
        assert len(stream._ids) <= 16  # type: ignore[attr-defined]
