"""The cache directory on disk: where it is, who may write, and how a file gets there whole or not at all.

Every directory of a model has one writer at a time (a file lock, released by the system when its holder dies). Writers
work in ``.partial-*`` directories beside the target and rename at the end, so a reader never meets half a file, and what a
killed writer left is removed by the next one. Knows nothing of catalogs or of where bytes come from.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minivllm_plugin.errors import ModelDownloadError

__all__ = [
    "cache_directory",
    "exclusive",
    "explained_errors",
    "model_directory",
    "partial_directory",
    "publish",
    "require_space",
    "sha256_of",
]

PARTIAL_PREFIX = ".partial-"
CHUNK_BYTES = 1 << 20


def cache_directory() -> Path:
    """``$MINIVLLM_CACHE``, else ``$XDG_CACHE_HOME/minivllm``, else ``~/.cache/minivllm``. Not created here."""
    own = os.environ.get("MINIVLLM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path("~/.cache").expanduser()  # the XDG rule: relative is ignored
    return base / "minivllm"


def model_directory(name: str) -> Path:
    """The directory of one catalog model inside the cache. Not created here."""
    return cache_directory() / "models" / name


@contextmanager
def exclusive(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Be the only writer of ``directory`` (created when missing); stale partial work in it is removed.

    ``on_wait`` is called once when another process holds the lock; then we wait for it.
    """
    from filelock import FileLock, Timeout

    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        for stale in directory.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def partial_directory(directory: Path) -> Iterator[Path]:
    """A scratch directory on the target's own file system, removed whatever happens. Needs :func:`exclusive`."""
    path = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, target: Path) -> None:
    """Make a finished file visible under its name: flushed to disk first, then renamed in one step."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)
    if os.name == "posix":  # the rename itself must survive a power cut too
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def require_space(directory: Path, needed: int, what: str) -> None:
    """Refuse before the first byte when ``directory``'s disk has less than ``needed`` bytes free.

    Raises:
        ModelDownloadError: naming the directory, bytes needed and free, and the remedy.
    """
    if shutil.disk_usage(directory).free < needed:
        raise ModelDownloadError(_no_space(directory, needed, what))


@contextmanager
def explained_errors(directory: Path, needed: int, what: str) -> Iterator[None]:
    """Turn what the file system says (full, read-only, forbidden) into a ModelDownloadError with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelDownloadError(_no_space(directory, needed, what)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ModelDownloadError(
                f"cannot store {what} in {str(directory)!r}: {error}. Make that directory writable, or set "
                "MINIVLLM_CACHE to one that is"
            ) from error
        raise


def _no_space(directory: Path, needed: int, what: str) -> str:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"not enough disk space for {what} in {str(directory)!r}: {needed:,} bytes needed while it is fetched, {free:,} free. "
        "Free some space, or set MINIVLLM_CACHE to a directory on a larger disk"
    )
