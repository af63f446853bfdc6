"""Text in and out of one LLM: strings, conversations, counts, the progress bar, and whose vocabulary bounds token ids."""

from collections.abc import Iterator
from typing import Any

import pytest
import toy_tokenizers as toys

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.serving.chat import render_chat
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.serving.tokenizer_files import TokenizerSettings
from minivllm_plugin.testing import scripted_llm

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
VOCABULARY = 1000  # of the model; the tokenizer knows fewer ids, as padded checkpoints have it
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
FIRST = [{"role": "user", "content": "hello"}]
SECOND = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how are you?"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(toys.byte_per_token(), TokenizerSettings(chat_templates={"default": TEMPLATE}))


@pytest.fixture
def llm(tokenizer: Tokenizer) -> Iterator[LLM]:
    letters = tokenizer.encode("ďábel")  # an answer that goes round, so that text shows
    engine, _ = scripted_llm(
        tokenizer=tokenizer, vocab_size=VOCABULARY, eos=999, choose=lambda seq: letters[seq.num_completion_tokens % len(letters)]
    )
    yield engine
    engine.close()


def test_strings_and_dictionaries_are_tokenised_and_kept(llm: LLM, tokenizer: Tokenizer) -> None:
    salted = {"prompt": "two", "cache_salt": "mine"}
    outputs = llm.generate(["one", salted, tokenizer.encode("three")], SamplingParams(max_tokens=7), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["one", "two", None]
    assert [output.prompt_token_ids for output in outputs] == [tokenizer.encode(text) for text in ("one", "two", "three")]
    assert [output.outputs[0].text for output in outputs] == ["ďábel"] * 3


def test_one_conversation_or_several(llm: LLM, tokenizer: Tokenizer) -> None:
    [alone] = llm.chat(FIRST, FIVE, use_tqdm=False)
    several = llm.chat([FIRST, SECOND], [FIVE, SamplingParams(max_tokens=2, ignore_eos=True)], use_tqdm=False)
    assert [output.prompt_token_ids for output in several] == [render_chat(tokenizer, FIRST), render_chat(tokenizer, SECOND)]
    assert several[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert [len(output.outputs[0].token_ids) for output in several] == [5, 2]
    assert llm.submit_chat(FIRST, FIVE).result().outputs[0].text == alone.outputs[0].text
    open_end = [*FIRST, {"role": "assistant", "content": "I"}]
    [continued] = llm.chat(open_end, FIVE, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt_token_ids == tokenizer.encode("<s>user: hello<s>assistant: I")


def test_counts_are_those_of_the_request(llm: LLM) -> None:
    for prompt in ("žluť", [1, 2, 3], {"prompt": "abc"}):
        assert llm.count_tokens(prompt) == len(llm.generate(prompt, FIVE, use_tqdm=False)[0].prompt_token_ids)  # type: ignore[arg-type]
    assert llm.count_tokens(SECOND) == len(llm.chat(SECOND, FIVE, use_tqdm=False)[0].prompt_token_ids)


def test_a_bad_conversation_of_several_starts_none_of_them(llm: LLM) -> None:
    for bad in ([FIRST, []], [FIRST, [{"role": "alien", "content": "x"}]], [FIRST, [{"role": "user", "content": "x" * 9999}]]):
        with pytest.raises(InvalidRequestError):
            llm.chat(bad, FIVE, use_tqdm=False)
    assert llm.snapshot().step == 0


def test_the_progress_bar_is_on_standard_error_and_can_be_switched_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], FIVE)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "tok/s" in err
    llm.chat(FIRST, FIVE, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_ids_are_bounded_by_the_models_vocabulary_and_not_the_tokenizers(llm: LLM, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size < VOCABULARY - 1 == llm.vocab_size - 1
    assert llm.generate([VOCABULARY - 1], FIVE, use_tqdm=False)[0].finished
    assert llm.generate([1], SamplingParams(max_tokens=1, stop_token_ids=[VOCABULARY - 1]), use_tqdm=False)[0].finished
    for prompt, params in (([VOCABULARY], FIVE), ([1], SamplingParams(stop_token_ids=[VOCABULARY]))):
        with pytest.raises(InvalidRequestError, match=rf"{VOCABULARY}.*0\.\.{VOCABULARY - 1}"):
            llm.submit(prompt, params)


@pytest.mark.parametrize("name", ["temprature", "max_new_tokens", "best_of", "beam_width"])
def test_unknown_sampling_parameters_are_named_with_the_known_ones(name: str) -> None:
    given: dict[str, Any] = {name: 1}
    for make in (lambda: SamplingParams(**given), lambda: SamplingParams().replace(**given)):
        with pytest.raises(InvalidRequestError, match=rf"{name}.*temperature"):
            make()
