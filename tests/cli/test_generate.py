"""``minivllm generate`` over a scripted engine."""

import json
from collections.abc import Callable
from typing import Any

from minivllm_plugin.sampling_parameters import SamplingParams

Run = Callable[..., tuple[int, str, str]]


def test_generate_streams_the_answer_through_the_chat_template(run: Run, llm: Any) -> None:
    code, out, _ = run("generate", "m", "hi", "--system", "be brief")
    assert (code, out) == (0, "Hello\n")
    assert llm.asked == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]]
    assert (llm.closed, llm.closed_streams) == (1, 1)


def test_generate_raw_sends_the_text_as_it_is(run: Run, llm: Any) -> None:
    run("generate", "m", "Once upon", "--raw")
    llm.chat_template = None
    run("generate", "m", "a time")
    assert llm.asked == ["Once upon", "a time"]
    code, _, err = run("generate", "m", "x", "--system", "s")
    assert code == 1
    assert "--system needs the chat template" in err


def test_generate_reads_standard_input(run: Run, llm: Any, piped: Any) -> None:
    piped("line one\nline two\n")
    run("generate", "m", "-", "--raw")
    assert llm.asked == ["line one\nline two\n"]


def test_generate_json_is_one_object(run: Run, llm: Any) -> None:
    _, out, _ = run("generate", "m", "hi", "--raw", "--json")
    assert json.loads(out) == {
        "text": "Hello",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 1,
    }


def test_generate_passes_every_sampling_and_engine_option(run: Run, llm: Any) -> None:
    sampling = "--max-tokens 5 --temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1 --seed 9 --min-tokens 2"
    stops = "--stop a --stop b --stop-token-id 4 --ignore-eos --include-stop"
    engine = "--dtype float32 --device cpu --load-format dummy --max-model-len 32 --num-blocks 8 --revision r"
    code, _, err = run("generate", "m", "hi", *f"{sampling} {stops} {engine}".split())
    assert code == 0, err
    assert llm.params[0] == SamplingParams(
        max_tokens=5,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        include_stop_str_in_output=True,
    )
    assert llm.options == {
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "load_format": "dummy",
        "max_model_len": 32,
        "num_blocks": 8,
        "revision": "r",
    }


def test_options_not_given_keep_the_models_defaults(run: Run, llm: Any) -> None:
    run("generate", "m", "hi")
    assert (llm.params[0].temperature, llm.params[0].top_k, llm.params[0].max_tokens) == (0.25, 7, 256)
    assert set(llm.options) == {"model", "dtype", "device", "load_format"}


def test_the_models_own_defaults_stand_in_for_what_is_not_given(run: Run, llm: Any) -> None:
    run("generate", "m", "hi")
    run("generate", "m", "hi", "-t", "0")
    assert [params.temperature for params in llm.params] == [0.25, 0]


def test_a_bad_sampling_option_is_a_typed_error(run: Run, llm: Any) -> None:
    code, _, err = run("generate", "m", "hi", "--temperature", "nan")
    assert code == 1
    assert "temperature must be a finite number" in err
    assert llm.closed == 1
