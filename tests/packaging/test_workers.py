"""How many processes scripts/test runs the tests in: one a core for folders, none for a few files."""

from pathlib import Path

import pytest
from workers import FEWEST_FILES, MOST_WORKERS, num_workers, threads_of_a_worker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: ``small`` with one file too few, ``large`` with one more, in a folder below."""
    for name, count in (("small", FEWEST_FILES - 1), ("large/below", FEWEST_FILES)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "conftest.py").touch()
        for number in range(count):
            (tmp_path / name / f"test_{number}.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "cores", "workers"),
    [
        (["large"], 2, 2),
        (["large"], 1, 0),
        (["large"], 1000, MOST_WORKERS),
        (["small"], 2, 0),
        (["small/test_1.py", "small/test_2.py::test_it[a::b]"], 2, 0),
        (["small", "small/test_1.py"], 2, 0),
        (["small", "large/below/test_1.py"], 2, 2),
        (["large/below/test_1.py::test_it"] * FEWEST_FILES, 2, 0),
    ],
)
def test_workers_for_what_is_named(arguments: list[str], cores: int, workers: int) -> None:
    assert num_workers(arguments, cores) == workers


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 1), (4, 2, 2), (16, MOST_WORKERS, 2), (3, 2, 1), (1, 2, 1)])
def test_all_workers_together_have_a_thread_a_core(cores: int, workers: int, threads: int) -> None:
    assert threads_of_a_worker(cores, workers) == threads
