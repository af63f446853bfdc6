"""`minivllm autoload`: what it writes, what that does at the start of a Python, and that it goes away whole."""

import os
import site
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import minivllm_adapters
import minivllm_kernels
import minivllm_plugin
from minivllm_adapters import autoload, autoload_hook
from minivllm_adapters.errors import AutoloadError

ROOTS = [Path(module.__file__ or "").parents[1] for module in (minivllm_plugin, minivllm_kernels, minivllm_adapters)]
CALL = """
    import litellm
    try:
        litellm.completion(model="minivllm/no-such-model", messages=[{"role": "user", "content": "hello"}])
    except litellm.NotFoundError as error:
        print("ours:", error.llm_provider)
"""
HOOKED = "import sys; print([type(finder).__module__ for finder in sys.meta_path if 'minivllm' in type(finder).__module__])"


class Environment:
    """A virtual environment with our packages and LiteLLM on its path, as an installation would have them."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
        self.python = folder / "bin" / "python"
        [self.site_packages] = folder.glob("lib/python*/site-packages")
        self.packages = self.site_packages / "packages.pth"  # read before ours, like an editable install's
        self.packages.write_text("".join(f"{path}\n" for path in [*ROOTS, sysconfig.get_path("purelib")]))

    def run(self, code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *options, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment},
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("autoload") / "venv")


@pytest.fixture
def switched_on(environment: Environment) -> Environment:
    result = environment.run("from minivllm_adapters import autoload; print(autoload.enable().explain())")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"on: {environment.site_packages / autoload.FILE_NAME}")
    return environment


# --- in an environment of its own ---------------------------------------------------------------------------------------------


def test_plain_import_litellm_is_enough(switched_on: Environment) -> None:
    result = switched_on.run(CALL, "-I")  # isolated mode reads site files too
    assert result.stdout.strip() == "ours: minivllm", result.stderr


def test_from_litellm_import_is_enough_too(switched_on: Environment) -> None:
    result = switched_on.run("""
        from litellm import completion, custom_provider_map
        import litellm, sys
        import minivllm_adapters
        assert [entry["custom_handler"] for entry in custom_provider_map] == [minivllm_adapters.provider]
        # The hook leaves no trace: LiteLLM reads its own data files through its loader.
        assert type(litellm.__spec__.loader).__name__ == type(litellm.__loader__).__name__ == "SourceFileLoader"
        assert not [finder for finder in sys.meta_path if "minivllm" in type(finder).__module__]
        assert "torch" not in sys.modules
    """)
    assert result.returncode == 0, result.stderr


def test_a_start_without_litellm_costs_one_small_module(switched_on: Environment) -> None:
    result = switched_on.run("""
        import sys
        print(sorted(name for name in sys.modules if name.startswith(("minivllm", "litellm", "torch"))))
    """)
    assert result.stdout.strip() == "['minivllm_adapters', 'minivllm_adapters.autoload_hook']"
    assert result.stderr == ""


def test_the_switch_for_one_process(switched_on: Environment) -> None:
    assert switched_on.run(HOOKED).stdout.strip() == "['minivllm_adapters.autoload_hook']"
    assert switched_on.run(HOOKED, MINIVLLM_AUTOLOAD="0").stdout.strip() == "[]"


def test_off_removes_it_whole(switched_on: Environment) -> None:
    before = {path.name for path in switched_on.site_packages.iterdir()}
    result = switched_on.run("from minivllm_adapters import autoload; print(autoload.disable().explain())")
    assert result.stdout.startswith("off:"), result.stderr
    assert before - {path.name for path in switched_on.site_packages.iterdir()} == {autoload.FILE_NAME}
    assert switched_on.run(HOOKED).stdout.strip() == "[]"


def test_a_package_that_vanished_is_passed_over_in_silence(switched_on: Environment) -> None:
    packages = switched_on.packages.read_text()
    switched_on.packages.write_text("")
    try:
        result = switched_on.run("print('started')")
    finally:
        switched_on.packages.write_text(packages)
    assert (result.stdout.strip(), result.stderr) == ("started", "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("answer = 42", "42"), ("raise ValueError('broken litellm')", "ValueError: broken litellm"), ("import nowhere", "nowhere")],
)
def test_a_strange_litellm_is_imported_as_if_we_were_not_there(
    switched_on: Environment, tmp_path: Path, source: str, expected: str
) -> None:
    (tmp_path / "litellm.py").write_text(source)
    code = "try:\n import litellm; print(litellm.answer)\nexcept Exception as error: print(type(error).__name__ + ':', error)"
    result = switched_on.run(code, PYTHONPATH=str(tmp_path))
    assert expected in result.stdout
    assert result.stderr == ""
    loud = switched_on.run(code, PYTHONPATH=str(tmp_path), MINIVLLM_AUTOLOAD="debug")
    assert expected in loud.stdout
    assert ("Traceback" in loud.stderr) == (source == "answer = 42")


def test_no_litellm_at_all(switched_on: Environment) -> None:
    packages = switched_on.packages.read_text()
    switched_on.packages.write_text("".join(f"{path}\n" for path in ROOTS))
    try:
        result = switched_on.run("import litellm")
    finally:
        switched_on.packages.write_text(packages)
    assert result.stderr.strip().endswith("ModuleNotFoundError: No module named 'litellm'")


# --- the file -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as a site directory of this process."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path), "/no/such/folder"])
    return tmp_path


def test_on_and_off_are_idempotent_and_say_what_they_did(folder: Path) -> None:
    assert not autoload.status(folder).enabled
    for _ in range(2):
        state = autoload.enable(folder)
        assert state.enabled
        assert state == autoload.status(folder)
        assert state.path == folder / autoload.FILE_NAME
        assert state.path.read_text() == autoload.LINE
        assert state.path.stat().st_mode & 0o777 == 0o644
        assert str(state.path) in state.explain()
        assert "off" in state.explain()
    assert [path.name for path in folder.iterdir()] == [autoload.FILE_NAME]  # no temporary file stays
    for _ in range(2):
        assert not autoload.disable(folder).enabled
    assert list(folder.iterdir()) == []
    assert "register()" in autoload.status(folder).explain()


def test_the_file_is_one_import_line() -> None:
    assert autoload.LINE.count("\n") == 1
    assert autoload.LINE.endswith("\n")
    assert autoload.LINE.startswith("import ")  # else Python takes it for a path
    compile(autoload.LINE, "line", "exec")


@pytest.mark.parametrize("content", ["import evil\n", "", autoload.LINE + "import evil\n"])
def test_somebody_elses_file_is_left_alone(folder: Path, content: str) -> None:
    path = folder / autoload.FILE_NAME
    path.write_text(content)
    assert autoload.status(folder).foreign
    assert str(path) in autoload.status(folder).explain()
    for change in (autoload.enable, autoload.disable):
        with pytest.raises(AutoloadError, match="not ours"):
            change(folder)
    assert path.read_text() == content


def test_a_folder_in_the_files_place(folder: Path) -> None:
    (folder / autoload.FILE_NAME).mkdir()
    with pytest.raises(AutoloadError):
        autoload.enable(folder)


def test_a_folder_that_python_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(AutoloadError, match="reads no"):
        autoload.enable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / autoload.FILE_NAME).write_text(autoload.LINE)
    assert "no effect" in autoload.status(tmp_path).explain()


@pytest.mark.parametrize("failing", ["mkstemp", "replace", "unlink"])
def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The tests may run as root, whom permissions do not stop, so the refusal is made."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    if failing == "unlink":
        autoload.enable(folder)
        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(AutoloadError, match=r"cannot remove.*Permission denied"):
            autoload.disable(folder)
        return
    monkeypatch.setattr(autoload.tempfile if failing == "mkstemp" else os, failing, refuse)
    with pytest.raises(AutoloadError, match=r"cannot write.*Permission denied.*virtual environment") as caught:
        autoload.enable(folder)
    assert isinstance(caught.value, OSError)
    assert list(folder.iterdir()) == []


# --- the hook, in this process ------------------------------------------------------------------------------------------------


def test_installing_the_hook_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)
    autoload_hook.install()
    assert sys.meta_path == before  # LiteLLM is imported here already
    monkeypatch.delitem(sys.modules, "litellm")
    monkeypatch.setenv("MINIVLLM_AUTOLOAD", "0")
    autoload_hook.install()
    assert sys.meta_path == before
    monkeypatch.delenv("MINIVLLM_AUTOLOAD")
    for _ in range(2):
        autoload_hook.install()
        assert len(sys.meta_path) == len(before) + 1
    assert autoload_hook.installed()
    assert sys.meta_path[0].find_spec("json", None) is None
    autoload_hook.uninstall()
    assert sys.meta_path == before


def test_a_finder_that_fails_stops_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def find_spec(self, *args: object) -> None:
            raise RuntimeError("a broken finder")

    monkeypatch.setattr(sys, "meta_path", [Failing()])
    monkeypatch.setenv("MINIVLLM_AUTOLOAD", "debug")
    assert autoload_hook._LiteLLMFinder().find_spec("litellm", None) is None
    assert "a broken finder" in capsys.readouterr().err
