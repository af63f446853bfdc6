"""The file of packed weights: what goes in comes out, aligned; damage and a full disk are told, never mapped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm_plugin.errors import ModelLoadError
from minivllm_plugin.runner.tensor_file import MAGIC, PAGE, map_tensors, write_tensors


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "bytes": torch.randint(0, 256, (3, 5, 7), generator=generator, dtype=torch.uint8),
        "floats, exactly a page": torch.randn(1024, generator=generator),
        "halves": torch.randn(33, 65, generator=generator).bfloat16(),
        "one": torch.tensor([torch.pi]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "bad numbers": torch.tensor([torch.nan, torch.inf, -0.0]),
        "ünïcode": torch.ones(2, 2),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.bin"
    write_tensors(path, some_tensors())
    return path


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def test_what_goes_in_comes_out(file: Path) -> None:
    mapped = map_tensors(file)
    expected = some_tensors()
    assert list(mapped) == list(expected)
    for name, tensor in expected.items():
        assert same_bits(mapped[name], tensor), name


def test_every_tensor_begins_a_page(file: Path) -> None:
    assert {tensor.data_ptr() % PAGE for tensor in map_tensors(file).values() if tensor.numel()} == {0}
    assert file.stat().st_size % PAGE == 0


def test_a_mapping_is_private_and_outlives_the_file(file: Path) -> None:
    first, second = map_tensors(file), map_tensors(file)
    first["one"].zero_()
    file.unlink()
    assert same_bits(second["one"], some_tensors()["one"])
    assert same_bits(second["halves"], some_tensors()["halves"])


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_tensors(tmp_path / "empty.bin", {})
    assert map_tensors(tmp_path / "empty.bin") == {}


def header_of(path: Path) -> tuple[int, dict[str, dict[str, object]]]:
    data = path.read_bytes()
    start = int.from_bytes(data[8:16], "little")
    return start, json.loads(data[16:start])


def with_header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Rewrite the header as ``change`` leaves (or returns) it."""
    start, entries = header_of(path)
    changed = change(entries) or entries
    data = path.read_bytes()
    path.write_bytes(data[:16] + json.dumps(changed).encode().ljust(start - 16) + data[start:])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: path.rename(path.parent / "elsewhere").parent.joinpath(path.name).mkdir(),
    "another kind of file": lambda path: path.write_bytes(b"PK\x03\x04" * 4000),
    "magic only": lambda path: path.write_bytes(MAGIC),
    "cut in the header": lambda path: os.truncate(path, 100),
    "cut after the header": lambda path: os.truncate(path, header_of(path)[0]),
    "cut in the last tensor": lambda path: os.truncate(path, path.stat().st_size - PAGE),
    "start beyond the end": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\xff" * 8 + path.read_bytes()[16:]),
    "start of zero": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\0" * 8 + path.read_bytes()[16:]),
    "header of noise": lambda path: path.write_bytes(path.read_bytes()[:16] + b"\xff\xfe" * 50 + path.read_bytes()[116:]),
    "zeros all over": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a list for a header": lambda path: with_header(path, lambda _: [1, 2]),
    "an unknown type": lambda path: with_header(path, lambda e: e["one"].update(dtype="int4")),
    "a type that is none": lambda path: with_header(path, lambda e: e["one"].update(dtype=None)),
    "a negative offset": lambda path: with_header(path, lambda e: e["one"].update(offset=-PAGE)),
    "an offset of nothing": lambda path: with_header(path, lambda e: e["one"].update(offset="x")),
    "an offset between elements": lambda path: with_header(path, lambda e: e["one"].update(offset=PAGE + 1)),
    "a negative size": lambda path: with_header(path, lambda e: e["one"].update(shape=[-1])),
    "an endless size": lambda path: with_header(path, lambda e: e["one"].update(shape=[2**40, 2**40])),
    "a size that is none": lambda path: with_header(path, lambda e: e["one"].update(shape=7)),
    "a missing field": lambda path: with_header(path, lambda e: e["one"].pop("shape") and None),
    "an unknown field": lambda path: with_header(path, lambda e: e["one"].update(compressed=True)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_that_names_the_file_and_the_remedy(file: Path, damage: str) -> None:
    DAMAGE[damage](file)
    with pytest.raises(ModelLoadError, match=r"cannot read packed weights from .*some\.bin: .*; delete the file") as caught:
        map_tensors(file)
    assert str(file) in str(caught.value)


LIMITED = """
import resource, sys, torch
from pathlib import Path
from minivllm_plugin.runner.tensor_file import write_tensors
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_tensors(Path(sys.argv[1]), {str(i): torch.ones(1000) for i in range(8)})
    except OSError:
        print("refused")
    else:
        print("written")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on the size of files")
def test_a_write_that_falls_short_is_never_taken_for_done(tmp_path: Path) -> None:
    whole = PAGE + 8 * PAGE
    limits = (PAGE + 100, 4 * PAGE, whole - PAGE - 1, whole - PAGE + 3999, whole)
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "t.bin"), *map(str, limits)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["refused"] * 4 + ["written"]
