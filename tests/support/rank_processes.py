"""The further processes of tensor-parallel engines, as the system shows them. Linux only."""

from pathlib import Path

__all__ = ["has_ended", "is_gone", "rank_processes"]


def rank_processes(pid: int | str = "self") -> set[int]:
    """Live children of process ``pid`` that compute a part of a model."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except FileNotFoundError:  # a thread that has just ended
            continue
    return {child for child in found if b"minivllm_plugin.parallel.worker" in _command(child)}


def is_gone(pid: int) -> bool:
    """Ended, and no zombie of ours."""
    return not Path(f"/proc/{pid}").exists()


def has_ended(pid: int) -> bool:
    """Ended, though whoever adopted it may not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
