"""What int8 and bfloat16 cost in quality: perplexity of each kind of weights and KV cache against float32, on the CPU kernels.

    python benchmarks/perplexity.py --tokens 8192 --group 64 --group 32 --json perplexity.json

The text is CPython's own reference (``pydoc_data.topics``): English, technical, and on every machine that runs this. It is cut
into windows spread over its whole length; each is one prompt, and every token but the first of a window is predicted.
"""

import argparse
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from minivllm_kernels.cpu import library
from minivllm_kernels.cpu.build import build_library
from minivllm_kernels.cpu.decoder import CpuDecoder
from minivllm_plugin.bench.report import Report, significant
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.layers import RotaryTable
from minivllm_plugin.models.loader import LoadedModel, describe_model, load_model
from minivllm_plugin.runner.cpu_weights import decoder_geometry, pack_module
from minivllm_plugin.serving.tokenizer import Tokenizer

KINDS = ("float32", "bfloat16", "int8")
BLOCK_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    model = load_model(resolve(options.model), dtype="float32", load_format=options.load_format, max_positions=options.window)
    windows = _windows(options.model, options.load_format, options.tokens, options.window)
    runs = list(_measure(model, windows, options))
    report = Report(
        benchmark="perplexity",
        settings={
            "model": options.model,
            "load_format": options.load_format,
            "window": options.window,
            "predicted_tokens": sum(len(window) - 1 for window in windows),
            "text": "pydoc_data.topics",
            "text_sha256": hashlib.sha256(_text().encode()).hexdigest(),
        },
        summary=_against_float32(runs),
        runs=runs,
    )
    _show(report)
    if options.json is not None:
        report.write(options.json)


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


@contextmanager
def activation_group(group: int) -> Iterator[None]:
    """Within it the kernels quantise activations in groups of so many values: a library of its own is built for that."""
    build = functools.partial(build_library, extra_flags=(f"-DGROUP={group}",))
    library.kernel_library.cache_clear()
    try:
        with mock.patch.object(library, "build_library", build):
            yield
    finally:
        library.kernel_library.cache_clear()


def _measure(model: LoadedModel, windows: Sequence[Sequence[int]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cos_sin = RotaryTable(model.config.rope, model.config.head_dim, options.window).cos_sin
    for weights in options.weights:
        for group in options.group if weights == "int8" else [None]:
            with activation_group(group or options.group[0]):
                packed = pack_module(model.module, weights)
                for cache in options.cache:
                    decoder = CpuDecoder(
                        decoder_geometry(model.config),
                        packed,
                        cos_sin,
                        num_blocks=-(-options.window // BLOCK_SIZE),
                        block_size=BLOCK_SIZE,
                        cache_kind=cache,
                        threads=torch.get_num_threads(),
                    )
                    found = perplexity(decoder, windows)
                    Console(stderr=True).print(f"{weights} {group or ''} {cache}: {found:.4f}")
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
    return [ids[start : start + window] for start in range(0, stride * count, stride)][:count]


def _text() -> str:
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def _show(report: Report) -> None:
    table = Table(title=f"perplexity, {report.settings['predicted_tokens']} tokens, windows of {report.settings['window']}")
    for name in report.summary[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in report.summary:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    Console().print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for minivllm; needs a tokenizer")
    parser.add_argument("--tokens", type=int, default=8192, help="least number of predicted tokens")
    parser.add_argument("--window", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--weights", action="append", choices=KINDS, help="may be repeated; default: all")
    parser.add_argument("--cache", action="append", choices=KINDS, help="may be repeated; default: all")
    parser.add_argument("--group", action="append", type=int, help="values per activation scale; may be repeated; default: 64")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args(arguments)
    options.weights, options.cache = options.weights or list(KINDS), options.cache or list(KINDS)
    options.group = options.group or [64]
    return options


if __name__ == "__main__":
    main()
