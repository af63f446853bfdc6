"""Every configuration compiles for every card that docs/kernels.md names, without a device, and none spills unseen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm_kernels.triton.compilation import (
    SHARED_LIMITS,
    TARGETS,
    CompileCase,
    Compiled,
    all_cases,
    compile_case,
    excess,
    table,
)

# Ops that do little but move large rows.
WIDE = ("add_rms_norm", "attention_decode", "attention_prefill", "norm_rotary_store", "rms_norm", "rotary", "silu", "store_kv")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 80 s of processor time, which a busy machine stretches
def test_every_case_compiles_for_every_target_and_spills_no_more_than_it_may(
    tmp_path: Path, compiler_environment: dict[str, str]
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "minivllm_kernels.triton.compilation", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, env=compiler_environment, timeout=1100, check=False)
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    results = json.loads(report.read_text())
    assert [(result["case"], result["target"]) for result in results] == [
        (case.name, target) for case in all_cases() for target in TARGETS if target in case.targets
    ]
    assert all(0 < result["registers"] <= 255 and result["binary"] > 0 for result in results)
    # What a launch knows of alignment has reached the loads: 16 bytes a thread, the most there is.
    assert [result for result in results if result["case"].startswith(WIDE) and result["widest_load"] < 16] == []


def test_cases_have_names_of_their_own_and_a_reason_for_what_they_are_spared() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    spared = [case for case in cases if case.spill_limit or set(case.targets) != set(TARGETS)]
    assert [case.name for case in spared if not case.reason] == []


def result(stores: int = 0, loads: int = 0, shared: int = 0, target: int = 90) -> Compiled:
    return Compiled("one", target, 32, stores, loads, stores, shared, 16, 1000)


def case(spill_limit: int = 0) -> CompileCase:
    return CompileCase("one", None, {}, {}, 4, 1, spill_limit=spill_limit)


def test_a_spill_is_an_excess_unless_it_is_accepted() -> None:
    assert excess(case(), result()) is None
    assert excess(case(), result(4, 8)) == "one, sm_90: 12 bytes spilled, 0 accepted"
    assert excess(case(12), result(4, 8)) is None
    assert excess(case(11), result(4, 8)) is not None


def test_more_shared_memory_than_the_card_has_is_an_excess() -> None:
    assert excess(case(), result(shared=200_000)) is None
    assert excess(case(), result(shared=200_000, target=80)) == "one, sm_80: 200000 bytes of shared memory, a block has 166912"
    assert set(SHARED_LIMITS) == set(TARGETS)


def test_the_table_has_a_line_for_each_result() -> None:
    lines = table([result(), result(4, 8)]).splitlines()
    assert len(lines) == 4
    assert lines[3] == "| one | sm_90 | 32 | 12 | 0 | 16 | 1000 |"


def test_interpreted_kernels_are_not_compiled() -> None:
    """This process has TRITON_INTERPRET set: a report from here would be about nothing."""
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_case(all_cases()[0], 90)
