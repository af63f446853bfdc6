"""``minivllm plugins``, the commands that plugins add, and --plugin and --policy. Broken plugins stand beside working ones."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import minivllm_plugin
from minivllm_plugin.cli import app, main
from minivllm_plugin.errors import PluginError
from minivllm_plugin.plugins.discovery import BUILTIN

Run = Callable[..., tuple[int, str, str]]
Install = Callable[..., None]

WATCHER = """
from minivllm_plugin.plugins import hookimpl
class Plugin:
    @hookimpl
    def minivllm_step_finished(self, report): pass
    @hookimpl
    def minivllm_order_waiting(self, waiting): return []
    @hookimpl
    def minivllm_register_commands(self, cli):
        @cli.command()
        def weigh(what: str = "nothing"):
            "Weigh something."
            print("weighed", what)
"""
BROKEN = {
    "import": "raise ImportError('no such thing')",
    "exit": "import sys; sys.exit('this is a script')",
    "misspelt": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            @hookimpl
            def minivllm_step_finish(self, report): pass
        """,
    "arguments": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            @hookimpl
            def minivllm_step_finished(self, rapport): pass
        """,
    "newer": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            minivllm_api = ">=9"
            @hookimpl
            def minivllm_step_finished(self, report): pass
        """,
    "empty": "class Plugin: pass",
    "wrapper": """
        import pluggy
        class Plugin:
            @pluggy.HookimplMarker("minivllm")(wrapper=True)
            def minivllm_admit(self): return (yield)
        """,
    "async": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            @hookimpl
            async def minivllm_step_finished(self, report): pass
        """,
    "registering": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            @hookimpl
            def minivllm_register_models(self, registry): registry.add("LlamaForCausalLM", dict)
        """,
    "commanding": """
        from minivllm_plugin.plugins import hookimpl
        class Plugin:
            @hookimpl
            def minivllm_register_commands(self, cli): raise RuntimeError("no command today")
        """,
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a module with one plugin, as far as importlib.metadata can tell, outside pytest's protection."""
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    monkeypatch.delenv("MINIVLLM_PLUGINS", raising=False)
    monkeypatch.delenv("MINIVLLM_BLOCK_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, code: str = WATCHER) -> None:
        module = f"installed_{name}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-of-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[minivllm]\n{name} = {module}:Plugin\n")
        monkeypatch.syspath_prepend(str(tmp_path))  # forgets what was known of the directory

    return add


def rows(run: Run) -> dict[str, dict[str, Any]]:
    code, out, err = run("plugins", "--json")
    assert (code, err) == (0, "")
    return {row["name"]: row for row in json.loads(out)["plugins"]}


def test_every_built_in_plugin_is_listed(run: Run) -> None:
    found = rows(run)
    assert set(BUILTIN) <= set(found)
    assert all(found[name]["origin"] == "builtin" and found[name]["state"] == "on request" for name in BUILTIN)
    fair = found["fair"]
    assert fair["is_policy"]
    assert "order_waiting" in fair["hooks"]
    assert fair["load_ms"] >= 0


def test_an_installed_one_is_described(run: Run, install: Install) -> None:
    install("watcher")
    row = rows(run)["watcher"]
    assert row.pop("load_ms") > 0
    assert row == {
        "name": "watcher",
        "distribution": "dist-of-watcher",
        "version": "1.2",
        "origin": "installed",
        "state": "loads",
        "hooks": ["order_waiting", "register_commands", "step_finished"],
        "is_policy": True,
        "error": None,
    }


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_broken_one_is_a_line_and_the_others_are_listed(run: Run, install: Install, kind: str) -> None:
    install("watcher")
    install("broken", BROKEN[kind])
    found = rows(run)
    assert found["broken"]["error"]
    assert found["broken"]["distribution"] == "dist-of-broken"
    assert found["watcher"]["error"] is None
    code, out, err = run("plugins")
    assert (code, err) == (0, "")
    assert "watcher" in out
    assert "broken" in out


def test_the_error_says_what_is_wrong(run: Run, install: Install) -> None:
    for kind, code in BROKEN.items():
        install(kind, code)
    errors = {name: row["error"] for name, row in rows(run).items()}
    for kind, words in {
        "import": "no such thing",
        "exit": "this is a script",
        "misspelt": "minivllm_step_finish",
        "arguments": "rapport",
        "newer": ">=9",
        "empty": "implements no hook",
        "wrapper": "must not be a wrapper",
        "async": "must not be async",
        "registering": "LlamaForCausalLM",
        "commanding": "no command today",
    }.items():
        assert words in errors[kind]


def test_what_the_variables_exclude_is_not_imported(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("watcher")
    install("broken", BROKEN["import"])
    monkeypatch.setenv("MINIVLLM_PLUGINS", "watcher, broken, sjf")
    monkeypatch.setenv("MINIVLLM_BLOCK_PLUGINS", "broken,lpm")
    found = rows(run)
    assert (found["broken"]["state"], found["broken"]["load_ms"]) == ("blocked (MINIVLLM_BLOCK_PLUGINS)", None)
    assert found["broken"]["error"] is None
    assert [found[name]["state"] for name in ("watcher", "sjf", "slru")] == ["loads", "loads", "on request"]
    assert found["lpm"]["state"].startswith("blocked")
    monkeypatch.setenv("MINIVLLM_PLUGINS", "")
    assert rows(run)["watcher"]["state"] == "not in MINIVLLM_PLUGINS"


@pytest.mark.parametrize(
    ("allowed", "blocked", "words"),
    [
        (None, None, ("MINIVLLM_PLUGINS: unset: every installed plugin loads", "MINIVLLM_BLOCK_PLUGINS: unset")),
        ("", None, ("MINIVLLM_PLUGINS: empty: nothing loads",)),
        ("watcher", "a,b", ("MINIVLLM_PLUGINS: only watcher", "MINIVLLM_BLOCK_PLUGINS: never a, b")),
    ],
)
def test_it_says_which_variables_are_in_force(
    run: Run, install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str | None, blocked: str | None, words: tuple[str, ...]
) -> None:
    install("watcher")
    for name, value in (("MINIVLLM_PLUGINS", allowed), ("MINIVLLM_BLOCK_PLUGINS", blocked)):
        if value is not None:
            monkeypatch.setenv(name, value)
    _, out, _ = run("plugins")
    assert all(each in out for each in words)


def test_under_pytest_nothing_loads_by_itself_and_it_says_so(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("watcher")
    monkeypatch.setenv("PYTEST_VERSION", "8")
    assert rows(run)["watcher"]["state"] == "on request"
    assert "PYTEST_VERSION is set: nothing loads by itself" in run("plugins")[1]


def test_two_of_one_name_are_an_error(run: Run, install: Install, tmp_path: Path) -> None:
    install("sjf")
    code, out, _ = run("plugins", "--json")
    assert code == 0
    same = [row for row in json.loads(out)["plugins"] if row["name"] == "sjf"]
    assert [row["origin"] for row in same] == ["installed", "builtin"]
    assert "another plugin has this name" in same[0]["error"]


def test_listing_loads_nothing_heavy() -> None:
    code = """
import sys
from minivllm_plugin.cli import main
try:
    main(["plugins"])
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", [name for name in ("torch", "transformers", "litellm", "tokenizers", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


# --- commands of plugins ------------------------------------------------------------------------------------------------


def test_a_command_of_a_plugin_runs_and_stands_in_the_help(run: Run, install: Install) -> None:
    install("watcher")
    assert run("weigh", "--what", "gold") == (0, "weighed gold\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "Weigh something." in out
    assert "Commands of plugins" in out


def test_it_is_gone_when_its_plugin_is(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("watcher")
    assert run("weigh")[0] == 0
    monkeypatch.setenv("MINIVLLM_BLOCK_PLUGINS", "watcher")
    assert run("weigh")[0] == 2
    assert "weigh" not in [command.name for command in app.registered_commands]


@pytest.mark.parametrize("kind", ["import", "exit", "commanding"])
def test_a_failing_one_is_one_line_on_stderr(run: Run, install: Install, kind: str) -> None:
    install("watcher")
    install("broken", BROKEN[kind])
    code, out, err = run("weigh")
    assert (code, out) == (0, "weighed nothing\n")
    assert len(err.splitlines()) == 1
    assert "broken" in err
    assert "dist-of-broken 1.2" in err


def test_a_name_of_ours_is_not_given_away(run: Run, install: Install) -> None:
    install("thief", WATCHER.replace("def weigh", "def models"))
    code, out, err = run("--help")
    assert code == 0
    assert "Weigh something." not in out
    assert "'models'" in err
    assert "smollm2-135m" in run("models")[1]


@pytest.mark.parametrize("arguments", [["models"], ["--version"], ["chat", "--help"], ["pull", "nothing"]])
def test_our_own_commands_load_no_plugin(
    install: Install, capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    marker = tmp_path / "loaded"
    install("watcher", f"open({str(marker)!r}, 'w').close()\n{WATCHER}")
    with pytest.raises(SystemExit):
        main(arguments)
    capsys.readouterr()
    assert not marker.exists()


# --- plugins of an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [("generate", "m", "hello"), ("chat", "m"), ("bench", "throughput", "m"), ("bench", "latency", "m")]
)
def test_plugins_and_policies_reach_the_engine(
    run: Run, llm: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    piped("")
    if command[0] == "bench":  # the engine is made, and that is enough to know
        load = minivllm_plugin.LLM

        def refuse(model: str, **options: Any) -> Any:
            load(model, **options)
            raise PluginError("not now")

        monkeypatch.setattr(minivllm_plugin, "LLM", refuse, raising=False)
    run(*command, "--plugin", "trace", "--plugin", "prometheus", "--policy", "sjf", "--policy", "lcf-victim")
    assert llm.options["plugins"] == ["trace", "prometheus"]
    assert llm.options["policies"] == ["sjf", "lcf-victim"]


def test_without_them_the_engine_has_its_defaults(run: Run, llm: Any) -> None:
    assert run("generate", "m", "hello")[0] == 0
    assert not {"plugins", "policies"} & set(llm.options)


@pytest.mark.parametrize("option", ["--plugin", "--policy"])
def test_an_unknown_one_is_one_message_before_anything_is_loaded(run: Run, option: str) -> None:
    code, out, err = run("generate", "no-such-model", "hello", option, "fairr")
    assert (code, out) == (1, "")
    assert err.startswith("minivllm: no plugin is called 'fairr'; known are")
    assert "Traceback" not in err


def test_a_plugin_that_is_no_policy_is_refused_as_one(run: Run, install: Install) -> None:
    install("watcher", WATCHER.replace("minivllm_order_waiting(self, waiting)", "minivllm_blocks_changed(self, events)"))
    code, _, err = run("generate", "no-such-model", "hello", "--policy", "watcher")
    assert code == 1
    assert "'watcher' is no policy" in err
