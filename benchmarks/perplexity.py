"""What int8 and bfloat16 cost in quality: perplexity of each kind of weights and KV cache against float32, on the CPU kernels.

    python benchmarks/perplexity.py --tokens 8192 --group 64 --group 32 --json perplexity.json

The text is CPython's own reference (``pydoc_data.topics``): English, technical, and on every machine that runs this. It is cut
into windows spread over its whole length; each is one prompt, and every token but the first of a window is predicted.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pydoc_data import topics
from typing import Any

import torch
from op_timing import report_path

from minivllm_kernels.cpu.build import build_library
from minivllm_kernels.cpu.decoder import CpuDecoder
from minivllm_kernels.cpu.library import open_library
from minivllm_kernels.cpu.packing import GROUP4, KINDS
from minivllm_plugin.bench.report import Report, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.layers import RotaryTable
from minivllm_plugin.models.loader import LoadedModel, describe_model, load_model
from minivllm_plugin.runner.cpu_weights import decoder_geometry, pack_module
from minivllm_plugin.serving.tokenizer import Tokenizer

CACHES = ("float32", "bfloat16", "int8")
GROUPS_OF_KINDS = {"int4": GROUP4}  # activations that share a scale where the kind leaves no choice
BLOCK_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    model = load_model(resolve(options.model), dtype="float32", load_format=options.load_format, max_positions=options.window)
    windows = _windows(options.model, options.load_format, options.tokens, options.window)
    runs = list(_measure(model, windows, options))
    predicted = sum(len(window) - 1 for window in windows)
    report = Report(
        benchmark="perplexity",
        title=f"{options.model}, {predicted} tokens of English technical text, windows of {options.window}",
        settings={
            "model": options.model,
            "load_format": options.load_format,
            "window": options.window,
            "predicted_tokens": predicted,
            "text": "pydoc_data.topics",
            "text_sha256": hashlib.sha256(_text().encode()).hexdigest(),
        },
        summary=_against_float32(runs),
        runs=runs,
    )
    show_report(report, options.json)


def perplexity(decoder: CpuDecoder, windows: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    for window in windows:
        table = list(range(-(-len(window) // decoder.block_size)))
        rows = list(range(len(window) - 1))
        logits = decoder.forward(window, [len(window)], [len(window)], [table], rows)
        targets = torch.tensor(window[1:])
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").double().item()
        count += len(rows)
    return math.exp(total / count)


def _measure(model: LoadedModel, windows: Sequence[Sequence[int]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cos_sin = RotaryTable(model.config.rope, model.config.head_dim, options.window).cos_sin
    for weights in options.weights:
        packed = pack_module(model.module, weights)
        for group in options.group if weights == "int8" else [GROUPS_OF_KINDS.get(weights)]:
            flags = (f"-DGROUP={group}",) if weights == "int8" else ()
            library = open_library(build_library(extra_flags=flags))
            for cache in options.cache:
                decoder = CpuDecoder(
                    decoder_geometry(model.config),
                    packed,
                    cos_sin,
                    num_blocks=-(-options.window // BLOCK_SIZE),
                    block_size=BLOCK_SIZE,
                    cache_kind=cache,
                    threads=torch.get_num_threads(),
                    library=library,
                )
                found = perplexity(decoder, windows)
                print(f"{weights} {group or ''} {cache}: {found:.4f}", file=sys.stderr)
                yield {"weights": weights, "activation_group": group, "cache": cache, "perplexity": found}


def _against_float32(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    exact = next((run["perplexity"] for run in runs if run["weights"] == run["cache"] == "float32"), None)
    return [
        {
            **run,
            "perplexity": significant(run["perplexity"], 6),
            "percent_over_float32": None if exact is None else significant(100 * (run["perplexity"] / exact - 1), 3),
        }
        for run in runs
    ]


def _windows(name: str, load_format: str, num_tokens: int, window: int) -> list[list[int]]:
    """Windows at even distances in the text, as many as predict ``num_tokens`` tokens."""
    directory = describe_model(resolve(name), load_format=load_format).tokenizer_directory
    if directory is None:
        raise SystemExit(f"{name} has no tokenizer files; perplexity needs real text")
    ids = Tokenizer.load(directory).encode(_text())
    count = -(-num_tokens // (window - 1))
    if count * window > len(ids):
        raise SystemExit(f"the text has {len(ids)} tokens, {count} windows of {window} were asked for; lower --tokens")
    stride = (len(ids) - window) // max(count - 1, 1)
    return [ids[index * stride : index * stride + window] for index in range(count)]


def _text() -> str:
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for minivllm; needs a tokenizer")
    parser.add_argument("--tokens", type=int, default=8192, help="least number of predicted tokens")
    parser.add_argument("--window", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--weights", action="append", choices=KINDS, help="may be repeated; default: all")
    parser.add_argument("--cache", action="append", choices=CACHES, help="may be repeated; default: all")
    parser.add_argument("--group", action="append", type=int, choices=(32, 64), help="activations per scale of int8; default 64")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--json", type=report_path, help="write the report here")
    options = parser.parse_args(arguments)
    options.weights, options.cache = options.weights or list(KINDS), options.cache or list(CACHES)
    options.group = options.group or [64]
    return options


if __name__ == "__main__":
    main()
