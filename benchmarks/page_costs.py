"""What the page costs: the engine, the process that serves it, and the browser's map of 10,000 blocks.

    python benchmarks/page_costs.py --browser --json page_costs.json

On the engine's thread (CPU time, 32 decoding sequences, a runner that answers at once): the observer's share of a step, as the
difference between engines with and without it that take turns, and one snapshot. Beside it, one picture on the recorder's thread.

Then a page in a process of its own (``scripted_page.py``), whose CPU time is read before and after each window: nobody looks, a
client polls five times a second, and with ``--browser`` a tab of a chromium does, over an idle engine and over one that decodes
six sequences. What a client costs is the difference to the last window in which nobody looked. The browser's own CPU time
is not counted. Last, the pictures a second that the tab paints of 10,000 blocks, nine tenths of them reusable, with six guests.
"""

import argparse
import gc
import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from op_timing import report_path

from minivllm_plugin.bench.hook_scenarios import ConstantRunner
from minivllm_plugin.bench.report import Report, median, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.discovery import BUILTIN, GROUP
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_ui.check import open_url
from minivllm_ui.frames import decode
from minivllm_ui.observer import EngineObserver
from minivllm_ui.recorder import FRESH, Recorder

BLOCK_SIZE = 16
NUM_SEQUENCES = 32
NUM_GUESTS = 6
FEW, MANY = 1_000, 10_000
PERIOD = 0.2  # seconds between two polls, as the page does it
STEPS_A_FRAME = 14  # of 14 ms each
ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

Figures = Iterator[tuple[str, int, float, str]]
"""What, blocks of the pool, value, unit."""
CLAIMS = {  # of docs/ui.md
    "snapshot, engine thread": "< 0.2",
    "idle engine, nobody looks": "< 2",
    "idle engine, one poller more": "< 1",
    "idle engine, one tab more": "< 1",
    "busy engine, one poller more": "< 1",
    "busy engine, one tab more": "< 1",
    "six guests, the tab's map": ">= 5",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window in which the page's process is watched")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before a window")
    parser.add_argument("--rounds", type=int, default=2, help="of such windows")
    parser.add_argument("--steps", type=int, default=400, help="of an engine with and without the observer")
    parser.add_argument("--repeat", type=int, default=9, help="of such engines")
    parser.add_argument("--frames", type=int, default=15, help="pictures made of a busy engine")
    parser.add_argument("--browser", action="store_true", help="also a tab (playwright and a chromium)")
    parser.add_argument("--model", help="behind the page, instead of the scripted one")
    parser.add_argument("--json", type=report_path)
    options = parser.parse_args(arguments)
    most = FEW * BLOCK_SIZE // NUM_SEQUENCES - 3 * BLOCK_SIZE
    if not 1 <= options.steps <= most:
        parser.error(f"--steps is between 1 and {most}: the sequences must fit in {FEW} blocks")
    with _browser() if options.browser else nullcontext() as browser:
        runs = [
            {"what": what, "blocks": blocks, "value": value, "unit": unit}
            for figures in (_engine_costs(options), _page_costs(options, browser))
            for what, blocks, value, unit in figures
        ]
    grouped: dict[tuple[str, int, str], list[float]] = {}
    for one in runs:
        grouped.setdefault((one["what"], one["blocks"], one["unit"]), []).append(one["value"])
    summary = [
        {
            "what": what,
            "blocks": blocks,
            "median": significant(median(values), 3),
            "least": significant(min(values), 3),
            "most": significant(max(values), 3),
            "unit": unit,
            "claim": CLAIMS.get(what),
        }
        for (what, blocks, unit), values in grouped.items()
    ]
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    show_report(Report("page_costs", "the page over a scripted engine", settings, summary, runs), options.json)


# --- the engine's thread -----------------------------------------------------------------------------------------------


def _engine_costs(options: argparse.Namespace) -> Figures:
    for _ in range(options.repeat):
        without, with_it = (_microseconds_a_step(plugins, options.steps) for plugins in ([], [EngineObserver()]))
        yield "observer, engine thread", FEW, with_it - without, "us a step"
    for num_blocks in (FEW, MANY):
        engine, _ = _busy_engine(num_blocks, [])
        for _ in range(options.repeat):
            yield "snapshot, engine thread", num_blocks, _thread_ms(partial(take_snapshot, engine.scheduler)), "ms"
    for num_blocks in (FEW, MANY):
        for milliseconds in _frames(num_blocks, options.frames):
            yield f"a picture, {STEPS_A_FRAME} steps folded in", num_blocks, milliseconds, "ms"


def _busy_engine(num_blocks: int, given: Sequence[object]) -> tuple[LLMEngine, EnginePlugins]:
    """32 sequences that decode, of different lengths, so that their blocks fill one after another."""
    scheduler = Scheduler(NUM_SEQUENCES, 512, num_blocks, BLOCK_SIZE, -1, enable_chunked_prefill=True)
    engine = LLMEngine(scheduler, ConstantRunner(), Limits(1 << 20, 1 << 20))
    others = (*(point.name for point in entry_points(group=GROUP)), *BUILTIN)  # plugins that this machine happens to have
    config = EngineConfig(plugins=tuple(given), block_plugins=others, plugin_errors="raise")
    plugins = EnginePlugins(config, Extensions.builtin(), judges_speed=False)
    engine.attach(plugins)
    plugins.started(EngineHandle("scripted", lambda: take_snapshot(scheduler), lambda request_id: None, list))
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(NUM_SEQUENCES):
        engine.add_prompt([index + 100] * (BLOCK_SIZE + index % BLOCK_SIZE), endless)
    while not all(seq.num_completion_tokens for seq in (*scheduler.waiting, *scheduler.running)):
        engine.step()
    return engine, plugins


def _microseconds_a_step(given: Sequence[object], num_steps: int) -> float:
    engine, _ = _busy_engine(FEW, given)
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        for _ in range(num_steps):
            engine.step()
        return (time.thread_time() - began) / num_steps * 1e6
    finally:
        gc.enable()


def _thread_ms(call: Callable[[], object], calls: int = 50) -> float:
    began = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - began) / calls * 1000


def _frames(num_blocks: int, count: int) -> Iterator[float]:
    """Milliseconds of CPU of the thread that asks for a picture: folding what has happened, and making the bytes."""
    observer = EngineObserver()
    engine, _ = _busy_engine(num_blocks, [observer])
    recorder = Recorder(observer, dict)
    recorder.close()  # its own thread would fold some of it, uncounted
    recorder.frame()
    for _ in range(count):
        time.sleep(FRESH)
        for _ in range(STEPS_A_FRAME):
            engine.step()
        yield _thread_ms(recorder.frame, calls=1)


# --- the page's process ------------------------------------------------------------------------------------------------


class Page:
    """A served page, as another process sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.url = self._said("READY")

    def cpu_seconds(self) -> float:
        """What its process has used so far, all threads."""
        return float(self._asked("CPU"))

    def keep_busy(self) -> None:
        """Six sequences decode from now on."""
        self._asked("BUSY")

    def percent_of_a_core(self, wait: Callable[[], object]) -> float:
        """While ``wait`` waits."""
        began, used = time.perf_counter(), self.cpu_seconds()
        wait()
        return 100 * (self.cpu_seconds() - used) / (time.perf_counter() - began)

    def invite(self, guests: int) -> None:
        open_url(f"{self.url}engine/control", order={"guests": guests})

    def _asked(self, word: str) -> str:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        return self._said(word)

    def _said(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest
        raise SystemExit(f"the page ended before it said {word}; what it wrote to the terminal says why")


@contextmanager
def _page(options: argparse.Namespace, num_blocks: int, *more: str) -> Iterator[Page]:
    command = [sys.executable, str(Path(__file__).with_name("scripted_page.py")), "--num-blocks", str(num_blocks), *more]
    if options.model is not None:
        command += ["--model", options.model]
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Page(process)
        finally:  # leaving closes its input, which ends it
            if sys.exc_info()[0] is not None:
                process.terminate()


def _page_costs(options: argparse.Namespace, browser: Any) -> Figures:
    with _page(options, FEW) as page:
        time.sleep(options.settle)
        for _ in range(options.rounds):
            yield from _windows(page, "idle engine", options, browser)
        page.keep_busy()
        time.sleep(options.settle)
        for _ in range(options.rounds):
            yield from _windows(page, "busy engine", options, browser)
    if browser is not None:
        with _page(options, MANY, "--fill") as page:
            page.invite(NUM_GUESTS)
            with _tab(browser, page.url, options.settle) as tab:
                for _ in range(options.rounds):
                    yield "six guests, the tab's map", MANY, _frames_a_second(tab, options.seconds), "frames/s"


def _windows(page: Page, name: str, options: argparse.Namespace, browser: Any) -> Figures:
    """Nobody, a poller and a tab in turn."""
    percent = "% of a core"
    alone = page.percent_of_a_core(lambda: time.sleep(options.seconds))
    yield f"{name}, nobody looks", FEW, alone, percent
    polled = page.percent_of_a_core(lambda: _poll(page.url, options.seconds))
    yield f"{name}, one poller more", FEW, polled - alone, percent
    if browser is not None:
        with _tab(browser, page.url, options.settle) as tab:
            seen = page.percent_of_a_core(lambda: tab.wait_for_timeout(1000 * options.seconds))
        yield f"{name}, one tab more", FEW, seen - alone, percent
        time.sleep(options.settle)


def _poll(url: str, seconds: float) -> None:
    """Ask for the picture as the page's script does: five times a second, over one connection, naming the last one."""
    connection, version = http.client.HTTPConnection(urlsplit(url).netloc), ""
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.request("GET", f"/engine/state?since={version}")
        reply = connection.getresponse()
        body = reply.read()
        if reply.status == http.HTTPStatus.OK:
            version = decode(body).header["version"]
        elif reply.status != http.HTTPStatus.NO_CONTENT:
            raise SystemExit(f"the page answered a poll with {reply.status}")
        time.sleep(max(0.0, min(began + PERIOD, end) - time.perf_counter()))
    connection.close()


def _frames_a_second(tab: Any, seconds: float) -> float:
    began, before = time.perf_counter(), tab.evaluate("window.__kvFrames")
    tab.wait_for_timeout(1000 * seconds)
    return float(tab.evaluate("window.__kvFrames") - before) / (time.perf_counter() - began)


@contextmanager
def _browser() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit("--browser needs a chromium in the PATH: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise SystemExit("--browser needs playwright: pip install playwright") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def _tab(browser: Any, url: str, settle: float) -> Iterator[Any]:
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(url)
    tab.wait_for_function("window.__kvFrames > 0")
    tab.wait_for_timeout(1000 * settle)
    yield tab
    tab.close()


if __name__ == "__main__":
    main()
