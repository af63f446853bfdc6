"""Which plugins load, and that one which cannot be had stops nobody else: entry points, variables, names, versions."""

import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from plugin_bench import make_plugin

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError, PluginError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins import discovery
from minivllm_plugin.plugins.discovery import ALLOW_VARIABLE, BLOCK_VARIABLE, discover
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.plugins.reports import PluginReport
from minivllm_plugin.testing import scripted_llm
from minivllm_plugin.views import Budget

Install = Callable[..., None]

GOOD = """
from minivllm_plugin.hookspecs import hookimpl

class Good:
    @hookimpl
    def minivllm_step_started(self, plan): ...
"""
BROKEN = {
    "import": "raise ImportError('no such thing')",
    "exit": "raise SystemExit(3)",
    "interrupt": "raise KeyboardInterrupt",
    "mute": "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
    "syntax": "def (",
    "lacks": "something = 1",
    "constructor": "class Good:\n    def __init__(self): raise OSError('no room')",
    "arguments": "class Good:\n    def __init__(self, needed): ...",
    "newer": GOOD + "    minivllm_api = '>=9.0'\n",
    "unreadable": GOOD + "    minivllm_api = 'new'\n",
    "nothing": "class Good: ...",
    "misspelt": GOOD.replace("step_started", "step_startet"),
    "argument": GOOD.replace("plan", "plans"),
    "registers": GOOD + "    @hookimpl\n    def minivllm_register_metrics(self, registry): raise ValueError('half way')\n",
    "registers nonsense": GOOD + "    @hookimpl\n    def minivllm_register_stop_criteria(self, registry): registry.add('x', 3)\n",
    "wrapper": GOOD.replace("@hookimpl", "@hookimpl(wrapper=True)").replace("...", "\n        yield"),
    "hangs": "import threading\nthreading.Event().wait()",
}
SAYS = {
    "import": "ImportError: no such thing",
    "exit": "ImportError: it raised SystemExit: 3",
    "interrupt": "ImportError: it raised KeyboardInterrupt",
    "mute": "Mute: (it has no text",
    "syntax": "SyntaxError",
    "lacks": "AttributeError",
    "constructor": "OSError: no room",
    "arguments": "TypeError",
    "newer": "it needs minivllm_api >=9.0, this is 1.0; update minivllm-plugin or the plugin",
    "unreadable": "minivllm_api='new' is not understood; write it like '>=1.0,<2'",
    "nothing": "it implements no hook; mark its functions",
    "misspelt": "unknown hook 'minivllm_step_startet'",
    "argument": "{'plans'} are declared in the hookimpl but can not be found in the hookspec",
    "registers": "ValueError: half way",
    "registers nonsense": "stop criterion 'x' of plugin 'bad'",
    "wrapper": "minivllm_step_started must not be a wrapper",
    "hangs": "TimeoutError: its import has not ended after 0.05 s",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name=source, …)``: entry points ``name`` of modules with these sources, each with a class ``Good``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTEST_VERSION")  # so that they load by themselves, as in a program
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    monkeypatch.delenv(BLOCK_VARIABLE, raising=False)
    monkeypatch.setattr(discovery, "IMPORT_PATIENCE", 20.0)
    points: list[EntryPoint] = []

    def add(**sources: str) -> None:
        for name, source in sources.items():
            module = f"acme_{tmp_path.name.replace('-', '_')}_{len(points)}"
            (tmp_path / f"{module}.py").write_text(source)
            points.append(EntryPoint(name, f"{module}:Good", "minivllm"))
            monkeypatch.delitem(sys.modules, module, raising=False)

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "minivllm"
        return list(points)

    monkeypatch.setattr(discovery, "entry_points", entry_points)
    return add


def load(**options: Any) -> EnginePlugins:
    return EnginePlugins(EngineConfig(**options), Extensions.builtin())


def reports(plugins: EnginePlugins) -> dict[str, PluginReport]:
    return {report.name: report for report in plugins.reports()}


def usable(plugins: EnginePlugins) -> list[str]:
    return [report.name for report in plugins.reports() if not report.errors]


# --- one broken plugin (trial I01) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("bad", "good"), ("aaa", "bad")], ids=["first", "last"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_stops_nobody_else(
    kind: str, order: tuple[str, str], install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "hangs":
        monkeypatch.setattr(discovery, "IMPORT_PATIENCE", 0.05)
    good = next(name for name in order if name != "bad")
    install(**{name: BROKEN[kind] if name == "bad" else GOOD for name in order})
    extensions = Extensions.builtin()
    plugins = EnginePlugins(EngineConfig(), extensions)
    assert usable(plugins) == [good]
    (error,) = reports(plugins)["bad"].errors
    assert SAYS[kind] in error
    assert "\n" not in error
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"plugin 'bad' cannot be used: {error}"
    assert [entry.plugin for entry in plugins._calls["minivllm_step_started"]] == [good]
    assert plugins._collection._pluggy.get_plugin("bad") is None
    assert extensions.discard_owner("bad") == ()


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind != "hangs"])
def test_strict_mode_raises(kind: str, install: Install) -> None:
    install(good=GOOD, bad=BROKEN[kind])
    with pytest.raises(PluginError) as caught:
        load(plugin_errors="raise")
    assert SAYS[kind] in str(caught.value)
    assert "'bad'" in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind != "hangs"])
def test_a_broken_plugin_that_was_asked_for_raises(kind: str, install: Install) -> None:
    install(bad=BROKEN[kind])
    with pytest.raises(PluginError, match="'bad'") as caught:
        load(plugins=["bad"])
    assert SAYS[kind] in str(caught.value)


def test_an_engine_serves_beside_a_broken_plugin(install: Install) -> None:
    install(bad=BROKEN["import"], good=GOOD)
    llm, _ = scripted_llm()
    with llm:
        assert llm.submit([1, 2, 3]).result().outputs[0].token_ids
        assert [(report.name, bool(report.errors)) for report in llm.plugins()] == [("good", False), ("bad", True)]


def test_no_thread_is_left_by_loading(install: Install) -> None:
    install(good=GOOD)
    load()
    assert [thread for thread in threading.enumerate() if thread.name == "minivllm-import-good"] == []


# --- names and variables ------------------------------------------------------------------------------------------------


def test_all_load_in_the_order_of_their_names(install: Install) -> None:
    install(b=GOOD, c=GOOD, a=GOOD)
    assert usable(load()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("allow", "block", "argument", "expected"),
    [
        (None, None, (), ["a", "b", "c"]),
        ("", None, (), []),
        (" ", None, (), []),
        ("b", None, (), ["b"]),
        (" c , a,", None, (), ["a", "c"]),
        (None, "b", (), ["a", "c"]),
        (None, "b", ("c",), ["a"]),
        ("a,b", "b", (), ["a"]),
        (None, "zzz", (), ["a", "b", "c"]),
    ],
)
def test_the_variables(
    allow: str | None,
    block: str | None,
    argument: tuple[str, ...],
    expected: list[str],
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in ((ALLOW_VARIABLE, allow), (BLOCK_VARIABLE, block)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    install(a=GOOD, b=GOOD, c=GOOD)
    assert usable(load(block_plugins=argument)) == expected


def test_a_name_on_the_allow_list_that_nobody_has_is_said(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "a,typo")
    install(a=GOOD)
    assert usable(load()) == ["a"]
    assert "MINIVLLM_PLUGINS names typo, but no such plugin is installed" in caplog.text


def test_nothing_loads_by_itself_under_pytest(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(a=GOOD, bad=BROKEN["import"])
    monkeypatch.setenv("PYTEST_VERSION", "9")
    assert discover() == []
    assert usable(load(plugins=["a"])) == ["a"]
    monkeypatch.setenv(ALLOW_VARIABLE, "a")
    assert usable(load()) == ["a"]


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_what_is_blocked_is_not_even_imported(how: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(bad=BROKEN["import"])
    options: dict[str, Any] = {"plugins": ["bad"]}
    if how == "variable":
        monkeypatch.setenv(BLOCK_VARIABLE, "bad")
    else:
        options["block_plugins"] = ["bad"]
    assert load(**options).reports() == []
    with pytest.raises(PluginError, match="policy 'bad' is blocked by block_plugins or MINIVLLM_BLOCK_PLUGINS"):
        load(**{**options, "plugins": [], "policies": ["bad"]})


def test_two_installed_plugins_of_one_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(same=GOOD, other=GOOD)
    install(same=GOOD)
    plugins = load()
    assert usable(plugins) == ["other", "same"]
    assert "is called 'same', too; block one of the two, or rename its entry point" in caplog.text


def test_an_installed_plugin_cannot_take_the_name_of_one_of_ours(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(sjf=GOOD)
    assert usable(load()) == []
    assert "minivllm-plugin's own plugin is called 'sjf', too" in caplog.text


def test_a_given_object_of_an_installed_ones_name(install: Install) -> None:
    install(acme=GOOD)
    with pytest.raises(PluginError, match="two plugins are called 'acme'; give one another minivllm_name"):
        load(plugins=[make_plugin("acme", step_started=lambda plan: None)])


def test_fcfs_is_no_plugin() -> None:
    with pytest.raises(PluginError, match="'fcfs' is the engine's own order and no plugin: name no policy to have it"):
        load(policies=["fcfs"])


def test_unknown_names() -> None:
    for option in ("plugins", "policies"):
        with pytest.raises(PluginError, match=r"no plugin is called 'nosuch'; known are .*fair.*sjf"):
            load(**{option: ["nosuch"]})


# --- what is given ------------------------------------------------------------------------------------------------------


class Observer:
    @hookimpl
    def minivllm_step_started(self, plan: Any) -> None: ...


class Policy(Observer):
    minivllm_name = "my policy"

    @hookimpl
    def minivllm_step_budget(self, state: Any) -> None: ...


class Static:
    @hookimpl
    @staticmethod
    def minivllm_step_started(plan: Any) -> None: ...

    @hookimpl
    @classmethod
    def minivllm_step_finished(cls, report: Any) -> None: ...


def test_objects_modules_and_static_methods_are_plugins() -> None:
    plugins = load(plugins=[Observer(), make_plugin("module", step_started=lambda: None), Static()])
    assert {report.name: report.hooks for report in plugins.reports()} == {
        "Observer": ("step_started",),
        "module": ("step_started",),
        "Static": ("step_finished", "step_started"),
    }
    assert {report.origin for report in plugins.reports()} == {"given"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Observer, r"plugins has the class Observer; pass an object of it: Observer\(\)"),
        (None, "plugins must hold names or objects, got None"),
        ("", "plugins must hold names or objects, got ''"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_plugin_is_refused_by_the_config(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(plugins=(given,))


@pytest.mark.parametrize(
    "given", [7, object(), [], ModuleType("empty"), lambda: None], ids=["7", "object", "list", "module", "lambda"]
)
def test_an_object_without_hooks_is_refused(given: object) -> None:
    with pytest.raises(PluginError, match="it implements no hook"):
        load(plugins=[given])


def test_a_string_for_the_list() -> None:
    for option in ("plugins", "policies", "block_plugins"):
        with pytest.raises(ConfigError, match=f"{option} must be a list of names"):
            EngineConfig(**{option: "sjf"})


def test_two_objects_of_one_class_need_names_of_their_own() -> None:
    with pytest.raises(PluginError, match="two plugins are called 'Observer'"):
        load(plugins=[Observer(), Observer()])
    second = Observer()
    second.minivllm_name = "second"  # type: ignore[attr-defined]
    assert usable(load(plugins=[Observer(), second])) == ["Observer", "second"]


def test_what_it_says_of_itself() -> None:
    assert not load().has_observers
    assert load(plugins=[Observer()]).has_observers
    assert load(plugins=[Policy()]).decisions == frozenset()  # a policy that nobody names is not asked
    assert load(policies=[Policy()]).decisions == {"step_budget"}
    assert not load(policies=[make_plugin(admit=lambda request: None)]).has_observers


def test_one_object_named_twice_is_there_once() -> None:
    policy = Policy()
    for options in (
        {"plugins": [policy], "policies": [policy]},
        {"plugins": [policy], "policies": ["my policy"]},
        {"policies": [policy, policy]},
    ):
        plugins = load(**options)
        assert usable(plugins) == ["my policy"]
        assert len(plugins._calls["minivllm_step_budget"]) == len(plugins._calls["minivllm_step_started"]) == 1


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (">=1.0", True),
        (">=1.0,<2", True),
        (" >= 1 , < 2 ", True),
        ("==1.0", True),
        ("==1", True),
        ("!=1.1", True),
        (">1.0", False),
        ("<1", False),
        (">=1.1", False),
        ("<=0.9", False),
        ("~=1.0", False),
        ("", False),
        (7, False),
    ],
)
def test_versions(wanted: object, fits: bool) -> None:
    plugin = make_plugin(step_started=lambda: None)
    plugin.minivllm_api = wanted  # type: ignore[attr-defined]
    if fits:
        assert usable(load(plugins=[plugin])) == ["acme"]
    else:
        with pytest.raises(PluginError, match="minivllm_api"):
            load(plugins=[plugin])


def test_a_hook_of_the_future_may_be_optional() -> None:
    def minivllm_of_the_future(something: Any) -> None: ...

    plugin = make_plugin(step_started=lambda: None)
    plugin.minivllm_of_the_future = hookimpl(optionalhook=True)(minivllm_of_the_future)  # type: ignore[attr-defined]
    assert usable(load(plugins=[plugin])) == ["acme"]


# --- policies are inert until named ---------------------------------------------------------------------------------------


def test_policies_are_inert_until_named() -> None:
    asked: list[int] = []
    policy = make_plugin(step_budget=lambda: asked.append(1), step_started=lambda: asked.append(2))
    for options, expected in (({"plugins": [policy]}, {2}), ({"policies": [policy]}, {1, 2})):
        asked.clear()
        llm, _ = scripted_llm(options=options)
        with llm:
            llm.submit([1, 2, 3]).result()
            assert [report.is_policy for report in llm.plugins()] == ["policies" in options]
        assert set(asked) == expected


def test_the_policy_named_first_is_asked_first() -> None:
    asked: list[str] = []

    def plugin(name: str, answer: object) -> ModuleType:
        def step_budget() -> object:
            asked.append(name)
            return answer

        return make_plugin(name, step_budget=step_budget)

    silent, first, second = plugin("silent", None), plugin("first", Budget(1)), plugin("second", Budget(2))
    llm, _ = scripted_llm(options={"plugins": [second], "policies": [silent, first, "second"]})
    with llm:
        llm.submit([1, 2, 3]).result()
    assert asked[:4] == ["silent", "first", "silent", "first"]
    assert "second" not in asked


def test_an_observer_named_as_a_policy_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"'Observer' is no policy: it implements none of minivllm_admit, .*pass it as a plugin"
    ):
        load(policies=[Observer()])


# --- a distribution that is really installed --------------------------------------------------------------------------------

PROGRAM = """
from minivllm_plugin.testing import scripted_llm

llm, _ = scripted_llm()
with llm:
    llm.submit([1, 2, 3]).result()
    for report in llm.plugins():
        print(report.name, report.distribution, report.version, report.origin, report.hooks, report.num_calls > 0, report.errors)
"""


def test_an_installed_distribution_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "acme_plugin.py").write_text(GOOD)
    about = tmp_path / "acme_plugin-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[minivllm]\nacme = acme_plugin:Good\nbroken = acme_plugin:Missing\n")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    good, broken = (line for line in done.stdout.splitlines() if " acme-plugin " in line)
    assert good == "acme acme-plugin 1.5 installed ('step_started',) True ()"
    assert broken.startswith("broken acme-plugin 1.5 installed () False (\"AttributeError: module 'acme_plugin'")
    assert "plugin 'broken' (acme-plugin 1.5) cannot be used: AttributeError" in done.stderr
