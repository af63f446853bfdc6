"""Traces in files: the public shapes, our own, and what is wrong with a line."""

import json
from pathlib import Path

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import Trace, TraceRequest, generate_trace, read_trace, simulate, write_trace

MOONCAKE = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_mooncake_shape(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", json.dumps(MOONCAKE), "", json.dumps({**MOONCAKE, "timestamp": 0})))
    assert [request.arrival for request in trace] == [0.0, 1.5]
    assert trace.requests[1] == TraceRequest(1.5, 700, 5, (3, 4))
    assert (trace.block_tokens, trace.name) == (512, "t")


def test_the_azure_shape(tmp_path: Path) -> None:
    path = write(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    trace = read_trace(path)
    assert trace.requests[0] == TraceRequest(0.0, 374, 44)
    assert trace.requests[1].arrival == pytest.approx(4.314579, abs=1e-6)


def test_the_burstgpt_shape(tmp_path: Path) -> None:
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,Conversation log"]
    assert read_trace(write(tmp_path / "b.csv", *lines)).requests == (TraceRequest(5.0, 472, 18),)


@pytest.mark.parametrize("ids", ["1 2", "1;2", "[1, 2]"])
def test_generic_csv_names(tmp_path: Path, ids: str) -> None:
    cell = f'"{ids}"'
    path = write(tmp_path / "g.csv", "Arrival Time,input_tokens,output_tokens,hash_ids,user,priority", f"0.25,9,3,{cell},ann,2")
    trace = read_trace(path, block_tokens=8)
    assert trace.requests == (TraceRequest(0.25, 9, 3, (1, 2), tenant="ann", priority=2),)


def test_time_units_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "u.csv", "timestamp,prompt_tokens,output_tokens", "1500,9,3")
    with pytest.raises(ConfigError, match=r"u\.csv:2: .*seconds or milliseconds"):
        read_trace(path)
    assert read_trace(path, time_unit="ms").requests[0].arrival == 1.5
    assert read_trace(path, time_unit="s").requests[0].arrival == 1500.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 0, "input_length": 5}', "no column holds the output tokens"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 1}', "inputlength must be an integer, got 'x'"),
        ('{"timestamp": 0, "input_length": 2.5, "output_length": 1}', "must be an integer, got 2.5"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "must be an integer, got True"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 0}', "output_tokens must be an integer of at least 1, got 0"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "at least 0, got -1"),
        ('{"timestamp": "soon", "input_length": 5, "output_length": 1}', "a number or a date and time, got 'soon'"),
        ('{"timestamp": "nan", "input_length": 5, "output_length": 1}', "finite time"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}', "2 hash_ids of 512 tokens describe more"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "content ids must be between 0"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 7}', "hashids must be a list of integers, got 7"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "segments": [[1, 9]]}', "segments of 9 tokens do not fit"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "segments": [[1]]}', "content id, tokens"),
        ('{"timestamp": 0,', "not JSON"),
        ("[1, 2]", "must be a JSON object"),
    ],
)
def test_errors_name_file_line_and_value(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", json.dumps(MOONCAKE), line)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: ") as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_a_row_of_another_width_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "w.csv", "arrival,prompt_tokens,output_tokens", "0,1,1", "0,1")
    with pytest.raises(ConfigError, match=r"w\.csv:3: .*as many values"):
        read_trace(path)


def test_unusable_lines_can_be_left_out(tmp_path: Path) -> None:
    bad = json.dumps({**MOONCAKE, "output_length": 0})
    trace = read_trace(write(tmp_path / "t.jsonl", bad, json.dumps(MOONCAKE), bad), skip_invalid=True)
    assert (len(trace), trace.num_skipped) == (1, 2)
    with pytest.raises(ConfigError, match="no usable request"):
        read_trace(write(tmp_path / "none.jsonl", bad), skip_invalid=True)


@pytest.mark.parametrize(("name", "message"), [("missing.csv", "no such file"), ("t.parquet", "suffix")])
def test_files_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    if message == "suffix":
        write(tmp_path / name, "x")
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_reading_can_stop_early(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[json.dumps(MOONCAKE)] * 5, "broken")
    assert len(read_trace(path, max_requests=3)) == 3


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_written_and_read_again_it_simulates_the_same(tmp_path: Path, suffix: str) -> None:
    made = generate_trace(40, rate=8, turns=3, shared_prefix_tokens=30, tenants=2, seed=4)
    hashed = (TraceRequest(0.1, 30, 4, (1, 2), priority=3), TraceRequest(9.0, 31, 4, (1, 2), tenant="x", id_offset=10**6))
    trace = Trace((*made.requests, *hashed), block_tokens=16, name="again").resized(70)
    path = tmp_path / f"again{suffix}"
    write_trace(trace, path)
    read = read_trace(path)
    assert (len(read), read.block_tokens, read.name) == (70, 16, "again")
    before, after = (simulate(one, num_blocks=120, record_tokens=True) for one in (trace, read))
    assert before.requests == after.requests
    assert before.served_at_last_arrival == after.served_at_last_arrival


def test_writing_elsewhere_is_refused(tmp_path: Path) -> None:
    trace = generate_trace(2)
    for path in (tmp_path / "no" / "t.csv", tmp_path / "t.txt"):
        with pytest.raises(ConfigError, match="existing directory"):
            write_trace(trace, path)
