"""What a constraint costs: compiling it, and the mask of each token, by kind of constraint.

    python benchmarks/structured_masks.py smollm2-135m

The completion of each constraint is made once by the model, greedy; then its matcher is led over those tokens again and again
while the masks alone are timed, without the model. A mask is computed on the engine's thread, between two steps.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy
from op_timing import finish, parser

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.bench.report import median, percentile, significant
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.compiler import CompiledGrammar, GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json schema": {"json": PERSON},
    "any json object": {"json_object": True},
    "regex": {"regex": r"[A-Z][a-z]{2,12} [A-Z][a-z]{2,12}, born in (19|20)[0-9]{2}"},
    "one of 1000 choices": {"choice": [f"answer number {number}" for number in range(1000)]},
    "grammar": {"grammar": 'start: sum\nsum: NUMBER (" + " NUMBER){1,8}\nNUMBER: /[0-9]{1,4}/'},
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    rows = []
    with LLM(options.model, max_model_len=512, max_num_sequences=8, num_threads=options.threads) as llm:
        compiler = GrammarCompiler(llm.tokenizer, llm.vocab_size)
        compiler.compile(StructuredOutputsParams(regex="a"))  # reads the vocabulary, once for all
        for name, constraint in CONSTRAINTS.items():
            form = StructuredOutputsParams(**constraint)
            began = time.perf_counter()
            compiled = compiler.compile(form)
            compiling = time.perf_counter() - began
            params = SamplingParams(temperature=0.0, max_tokens=options.tokens, structured_outputs=form)
            output = llm.generate("A person:\n", params, use_tqdm=False)[0].outputs[0]
            rows.append(
                {
                    "constraint": name,
                    "compile_ms": significant(compiling * 1e3),
                    **_masks(compiled, output.token_ids, options.seconds),
                }
            )
    finish("structured_masks", f"masks over {llm.vocab_size} tokens of {options.model}", options, rows)


def _masks(compiled: CompiledGrammar, token_ids: Sequence[int], at_least: float) -> dict[str, Any]:
    """Microseconds of one mask, over all tokens of a completion, led through again and again."""
    mask = numpy.zeros((compiled.vocab_size + 31) // 32, dtype=numpy.int32)
    taken: list[float] = []
    while sum(taken) < at_least:
        matcher = compiled.new_matcher()
        for place, token_id in enumerate(token_ids, 1):
            began = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            taken.append(time.perf_counter() - began)
            if place < len(token_ids) and not matcher.consume_tokens([token_id]):  # the last one may be an end token
                raise RuntimeError(f"the completion leaves its own grammar: {matcher.get_error()}")
    return {
        "tokens": len(token_ids),
        "mask_us": significant(median(taken) * 1e6),
        "mask_us_p99": significant(percentile(taken, 99) * 1e6),
        "mask_us_most": significant(max(taken) * 1e6),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="smollm2-135m")
    made.add_argument("--tokens", type=int, default=64, help="at most, in each completion")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
