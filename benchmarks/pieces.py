"""What ``run_all.py`` runs: every measurement of ``docs/performance.md`` as a piece with a command, a result and a duration.

A piece is one process that writes one report and takes less than four minutes on a quiet machine, so that a broken run goes on
where it stopped. Durations are what two cores at about 40 GB/s take.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Peers", "Piece", "pieces"]

HERE = Path(__file__).parent
FEW_ROUNDS = 2  # where one takes long and what is compared differs by more than rounds do
WITHOUT_GUESSES = "num_speculative_tokens=0"
BYTES_FOR_KEYS = "kv_cache_dtype=int8"  # OpenVINO keeps keys and values so by itself
QWEN = ("qwen3-0.6b", "--dummy", "--scenario", "offline")


@dataclass(frozen=True, slots=True)
class Piece:
    """One measurement.

    Attributes:
        name: of its report, without ``.json``.
        command: what is run, but for ``--json``.
        seconds: how long it takes, about.
        missing: why it cannot be run, if so.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Pythons of the peers' environments (None: not here), and how often they meet."""

    openvino: str | None = None
    llama_cpp: str | None = None
    rounds: int = 3


def pieces(peers: Peers) -> list[Piece]:
    """All of them, in the order in which they run: the contests first, while the machine is known to be quiet."""
    return [*_contests(peers), *_engine(), *_kernels()]


def _contests(peers: Peers) -> Iterator[Piece]:
    small, shared = ("smollm2-135m", "--scenario", "offline"), ("smollm2-135m", "--scenario", "prefix")
    quantised, both = ("--formats", "Q4_0"), ("--formats", "Q4_0", "--quantized", "int8", "int4")
    single = ("--n", "1", "--prefill", "0", "--ours-option", WITHOUT_GUESSES)
    yield _contest("peers-openvino-single", peers, "openvino", (*small, *both, *single, "--openvino-lookup", "5"), 80)
    yield _contest("peers-llama-cpp-single", peers, "llama.cpp", (*small, *both, *single), 40)
    kept = ("--ours-option", BYTES_FOR_KEYS)
    yield _contest("peers-openvino-q4", peers, "openvino", (*small, *quantised, "--n", "8", "32", *kept), 66)
    yield _contest("peers-llama-cpp-q4", peers, "llama.cpp", (*small, *quantised, "--n", "8", "32"), 60)
    yield _contest("peers-openvino-f16", peers, "openvino", (*small, "--formats", "F16"), 62)
    yield _contest("prefix-openvino", peers, "openvino", (*shared, *quantised), 95)
    rounds = ("--rounds", str(min(peers.rounds, FEW_ROUNDS)))
    yield _contest("prefix-llama-cpp", peers, "llama.cpp", (*shared, *quantised, *rounds), 225)
    alone = ("--quantized", "int4", *single)
    few, many = ("--n", "8"), ("--n", "32", "--prefill", "0")
    for peer, one, least, most in (("openvino", 120, 56, 115), ("llama.cpp", 50, 50, 110)):
        name = peer.replace(".", "-")
        lookup = ("--openvino-lookup", "5") if peer == "openvino" else ()
        yield _contest(f"qwen3-{name}-single", peers, peer, (*QWEN, *quantised, *alone, *lookup, *rounds), one)
        yield _contest(f"qwen3-{name}-few", peers, peer, (*QWEN, *quantised, *few, *rounds), least)
        more = kept if peer == "openvino" else ()
        yield _contest(f"qwen3-{name}-many", peers, peer, (*QWEN, *quantised, *many, *more, *rounds), most)


def _contest(name: str, peers: Peers, peer: str, options: Sequence[str], seconds: int) -> Piece:
    pythons = {"--openvino": peers.openvino, "--llama-cpp": peers.llama_cpp}
    named = [word for option, python in pythons.items() if python for word in (option, python)]
    rounds = () if "--rounds" in options else ("--rounds", str(peers.rounds))
    wanted = f"--{peer.replace('.', '-')}"
    missing = None if pythons[wanted] else f"{wanted} is not named"
    return Piece(name, _script("peers.py", *options, *rounds, "--against", peer, *named), seconds, missing)


def _engine() -> Iterator[Piece]:
    yield _bench("startup", ("--repeat", "5"), 10)
    for name, options, seconds in (
        ("int8", ("--quantization", "int8"), 15),
        ("int4", ("--quantization", "int4"), 20),
        ("bfloat16", ("--dtype", "bfloat16"), 25),
        ("float32", ("--dtype", "float32"), 45),
    ):
        yield _bench("throughput", ("--repeat", "5", *options), seconds, f"throughput-{name}")
    yield _bench("latency", (), 10)
    yield _bench("prefix", (), 35)
    yield _bench("step", (), 10)


def _kernels() -> Iterator[Piece]:
    """Last the quality, which does not depend on how quiet the machine is."""
    yield Piece("machine", _script("bench_machine.py"), 5)
    yield Piece("linear", _script("bench_linear.py", "--kind", "int8", "--rows", "1", "--rows", "32", "--rows", "256"), 12)
    shapes = ("--batch", "1,100", "--batch", "32,200", "--prefill", "512")
    kinds = ("--kind", "int8", "--kind", "int4", "--kind", "bfloat16_dot")
    yield Piece("decoder", _script("bench_decoder.py", *kinds, *shapes), 15)
    for name, seconds in (("norms", 12), ("rotary-store", 10), ("silu-and-mul", 12), ("sampling", 28)):
        yield Piece(name, _script(f"bench_{name.replace('-', '_')}.py"), seconds)
    yield Piece("perplexity", _script("perplexity.py", "--group", "64", "--group", "32"), 105)


def _bench(name: str, options: Sequence[str], seconds: int, report: str | None = None) -> Piece:
    # Not the console script: the very Python that runs all this has the engine that is measured.
    call = "import sys; sys.argv[0] = 'minivllm'; from minivllm_plugin.cli import main; main()"
    return Piece(report or name, (sys.executable, "-c", call, "bench", name, "smollm2-135m", *options), seconds)


def _script(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *options)
