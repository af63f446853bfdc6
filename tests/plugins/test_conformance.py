"""The conformance kit passes good plugins, and says of each bad one what is wrong with it; in a pytest of its own, too."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm_plugin.engine import intake
from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.errors import PluginError
from minivllm_plugin.plugins.discovery import BUILTIN
from minivllm_plugin.testing import conformance
from minivllm_plugin.testing.candidates import Candidate, neighbours
from minivllm_plugin.testing.conformance import CHECKS, ConformanceError, report_import

HEAD = """
import logging, threading
from minivllm_plugin.plugins import Budget, QueuedObserver, Reject, RequestTracer, hookimpl

class Acme{base}:
{body}
"""
Write = Callable[..., Candidate]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write(body, base="")``: a candidate whose class has this body."""
    monkeypatch.syspath_prepend(tmp_path)
    number = iter(range(100))

    def make(body: str, base: str = "") -> Candidate:
        module = f"conformance_{tmp_path.name.replace('-', '_')}_{next(number)}"
        source = HEAD.format(base=f"({base})" if base else "", body=textwrap.indent(textwrap.dedent(body), "    "))
        (tmp_path / f"{module}.py").write_text(source)
        return Candidate.find(f"{module}:Acme")

    return make


def hook(name: str, arguments: str, body: str) -> str:
    return f"@hookimpl\ndef minivllm_{name}(self, {arguments}):\n{textwrap.indent(body, '    ')}\n"


GOOD = {
    "observer": hook("step_finished", "report", "self.last = report"),
    "policy": hook("order_waiting", "waiting", "return [one.request_id for one in reversed(waiting)]"),
    "rejecting": hook("admit", "request", "return Reject('no') if request.num_prompt_tokens > 8 else None"),
    "salting": hook("cache_salt", "request", "return request.tenant"),
    "small budgets": hook("step_budget", "state", "return Budget(num_tokens=3, num_sequences=2)"),
}
BAD = {
    "step_finished raises": (
        "keeps_tokens_and_raises_nothing",
        hook("step_finished", "report", "raise ValueError('boom')"),
        "plugin 'Acme' raised, or answered what is no answer: step_finished: 5 errors in a row",
    ),
    "answers nonsense": (
        "keeps_tokens_in_bad_company",
        hook("order_waiting", "waiting", "return 'request-0'"),
        "order_waiting: 3 errors",
    ),
    "takes a step for a token": (
        "keeps_tokens_under_guesses",
        hook("step_finished", "report", "assert len(set(report.request_ids)) == len(report.request_ids)"),
        "step_finished: .* errors",
    ),
    "raises at the end": (
        "stands_the_death_of_an_engine",
        hook("engine_stopped", "error", "error.args"),
        "engine_stopped: 1 errors",
    ),
    "forgets the mark": (
        "implements_only_known_hooks",
        "def minivllm_step_finished(self, report): ...\n" + hook("step_started", "plan", "pass"),
        "minivllm_step_finished is not marked with @hookimpl: nobody would ever call it",
    ),
    "misspells": ("implements_only_known_hooks", hook("step_finish", "report", "pass"), "unknown hook 'minivllm_step_finish'"),
    "other arguments": ("implements_only_known_hooks", hook("step_finished", "reports", "pass"), r"\{'reports'\} are declared"),
    "newer": ("loads", "minivllm_api = '>=7'\n" + hook("step_started", "plan", "pass"), "it needs minivllm_api >=7"),
    "needs arguments": ("loads", "def __init__(self, x): ...", "cannot be loaded: TypeError"),
    "prints": ("shows_no_prompt", hook("blocks_changed", "events", "print(events)"), "it shows tokens of a prompt"),
    "logs": (
        "shows_no_prompt",
        hook("blocks_changed", "events", "logging.getLogger('acme').debug('%s', events)"),
        "it shows tokens of a prompt, which belong to the user: .*Blocks",
    ),
    "changes settings so that requests end early": (
        "keeps_tokens_and_raises_nothing",
        hook(
            "register_stop_criteria",
            "registry",
            "import minivllm_plugin.engine.intake as s\n"
            "s.end_reason = lambda seq, token_id, end_token_ids, num_slots: 'length'\n",
        )
        + hook("engine_stopped", "engine", "import minivllm_plugin.engine.intake as s\n"),
        "request 0 got the tokens",
    ),
    "breaks the pool": (
        "keeps_invariants",
        "def __init__(self):\n"
        "    from minivllm_plugin.engine.block_manager import BlockManager\n"
        "    BlockManager.deallocate = lambda pool, seq: seq.block_table.clear()\n" + hook("step_started", "plan", "pass"),
        "is in 0 block tables",
    ),
}


def test_who_takes_a_step_for_a_token_is_found_by_guesses_alone(write: Write) -> None:
    candidate = write(BAD["takes a step for a token"][1])
    CHECKS["keeps_tokens_and_raises_nothing"](candidate)
    with pytest.raises(ConformanceError, match=r"step_finished: .* errors"):
        CHECKS["keeps_invariants"](candidate)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", GOOD)
def test_good_plugins_pass(kind: str, check: str, write: Write) -> None:
    CHECKS[check](write(GOOD[kind]))


@pytest.mark.parametrize("name", BUILTIN)
def test_our_own_plugins_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # trace writes its file where it is
    for check in CHECKS.values():
        check(Candidate.find(name))


def test_a_property_that_raises_before_an_engine_runs_is_no_fault(write: Write) -> None:
    candidate = write(
        "@property\ndef port(self):\n    raise RuntimeError('no engine yet')\n" + hook("step_started", "plan", "pass")
    )
    assert candidate.hooks() == {"minivllm_step_started"}
    CHECKS["keeps_tokens_and_raises_nothing"](candidate)


@pytest.mark.parametrize("check", CHECKS)
def test_a_tracer_and_a_queued_observer_pass(check: str, write: Write) -> None:
    body = "def on_token(self, request_id, token_id, report):\n    self.last = request_id\n"
    CHECKS[check](write(body, "RequestTracer"))
    body = hook("step_finished", "report", "self.defer(len, report)") + hook("engine_stopped", "engine", "self.close()")
    CHECKS[check](write(body, "QueuedObserver"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("minivllm-plugin-")]


@pytest.mark.parametrize("kind", BAD)
def test_bad_plugins_are_told_why(kind: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((intake, "end_reason"), (BlockManager, "deallocate")):  # so that a plugin's own patch is undone
        monkeypatch.setattr(owner, name, getattr(owner, name))
    check, body, message = BAD[kind]
    with pytest.raises(AssertionError, match=message):
        CHECKS[check](write(body))


def test_a_thread_that_is_left_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "THREAD_PATIENCE", 0.02)
    body = "gate = threading.Event()\n" + hook(
        "engine_started", "engine", "threading.Thread(target=self.gate.wait, name='acme-worker', daemon=True).start()"
    )
    candidate = write(body)
    with pytest.raises(ConformanceError, match="threads are left after its engine was closed: acme-worker; end them in"):
        CHECKS["leaves_no_thread"](candidate)
    candidate.make().gate.set()


def test_a_module_is_a_candidate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_module_plugin.py").write_text(
        "from minivllm_plugin.hookspecs import hookimpl\n\n@hookimpl\ndef minivllm_step_started(plan): ...\n"
    )
    candidate = Candidate.find("acme_module_plugin")
    assert (candidate.hooks(), candidate.is_policy()) == ({"minivllm_step_started"}, False)
    for check in CHECKS.values():
        check(candidate)
    assert "'acme_module_plugin' imports in " in report_import(candidate)


def test_names_of_ours_are_found() -> None:
    assert Candidate.find("sjf").target == BUILTIN["sjf"]
    with pytest.raises(PluginError, match=r"'no such-thing' is no plugin's name \(.*sjf.*\) and no path"):
        Candidate.find("no such-thing")


def test_the_company_is_bad_enough() -> None:
    plugins, policies = neighbours()
    assert {plugin.__name__ for plugin in (*plugins, *policies)} == {"raising-neighbour", "slow-neighbour", "nonsense-neighbour"}
    with pytest.raises(RuntimeError, match="on purpose"):
        plugins[0].minivllm_step_started()


# --- in pytest ----------------------------------------------------------------------------------------------------------


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "minivllm_plugin.testing.pytest_plugin",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "acme_good.py").write_text(HEAD.format(base="", body=textwrap.indent(GOOD["policy"], "    ")))
    (tmp_path / "acme_bad.py").write_text(HEAD.format(base="", body=textwrap.indent(BAD["prints"][1], "    ")))
    (tmp_path / "test_own.py").write_text("def test_own(): assert True\n")
    return tmp_path


def test_pytest_runs_the_checks_alone(project: Path) -> None:
    done = run_pytest(project, "-v", "--minivllm-plugin", "acme_good:Acme")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"minivllm-plugin[acme_good:Acme]::{check} PASSED" in done.stdout for check in CHECKS] == [True] * len(CHECKS)
    assert "test_own" not in done.stdout
    assert f"{len(CHECKS)} passed" in done.stdout
    assert "plugin 'acme_good:Acme' imports in " in done.stdout


def test_pytest_runs_them_beside_tests_and_says_what_failed(project: Path) -> None:
    done = run_pytest(project, "test_own.py", "--minivllm-plugin", "acme_bad:Acme", "--minivllm-plugin=acme_good:Acme")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 failed, {2 * len(CHECKS)} passed" in done.stdout
    assert (
        "minivllm-plugin[acme_bad:Acme]::shows_no_prompt: it shows tokens of a prompt, which belong to the user: " in done.stdout
    )
    assert "Traceback" not in done.stdout


def test_a_plugin_that_is_not_there_fails_its_checks(project: Path) -> None:
    done = run_pytest(project, "--minivllm-plugin", "acme_missing:Acme")
    assert done.returncode == 1
    assert "acme_missing:Acme cannot be loaded: ModuleNotFoundError: No module named 'acme_missing'" in done.stdout


def test_without_the_option_nothing_changes(project: Path) -> None:
    done = run_pytest(project)
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    assert "minivllm" not in done.stdout.replace("minivllm_plugin", "")
