"""Cost models: what a step holds, and fits that find what is known."""

import json
import random
from pathlib import Path

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import CostModel, StepRecord, StepWork

KNOWN = CostModel(4e-3, 3e-4, 7e-5, 2e-6, 1e-7, 5e-4)


def some_work(count: int, seed: int = 0) -> list[StepWork]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        decodes, prefill = rng.choice([(0, 1), (1, 0), (1, 1)])
        num_decodes = decodes * rng.randint(1, 48)
        tokens = prefill * rng.randint(2, 512)
        made.append(StepWork(tokens, num_decodes, num_decodes * rng.randint(10, 400), tokens * rng.randint(2, 900)))
    return made


def coefficients(model: CostModel) -> list[float]:
    names = ("per_step", "per_prefill_token", "per_decode", "per_context_token", "per_attention_pair", "per_mixed_step")
    return [getattr(model, name) for name in names]


def test_a_fit_finds_the_model_that_made_the_times() -> None:
    fitted = CostModel.fit([StepRecord(work, KNOWN(work)) for work in some_work(200)])
    assert coefficients(fitted) == pytest.approx(coefficients(KNOWN), rel=1e-6)
    assert fitted.error == pytest.approx(0, abs=1e-9)


def test_a_fit_finds_it_in_noise() -> None:
    rng = random.Random(3)
    records = [StepRecord(work, KNOWN(work) * rng.uniform(0.9, 1.1)) for work in some_work(3000)]
    fitted = CostModel.fit(records)
    total, expected = sum(record.seconds for record in records), sum(fitted(record.work) for record in records)
    assert expected == pytest.approx(total, rel=0.01)
    assert fitted.per_prefill_token == pytest.approx(KNOWN.per_prefill_token, rel=0.05)
    assert 0.02 < fitted.error < 0.1


def test_steps_that_were_held_up_count_in_the_sum() -> None:
    # One step in ten takes twice as long. What is predicted is the mean, not the usual time.
    work = StepWork(0, 8, 800, 0)
    records = [StepRecord(work, 0.02 if number % 10 == 0 else 0.01) for number in range(100)]
    assert CostModel.fit(records)(work) == pytest.approx(0.011, rel=1e-3)


def test_no_coefficient_falls_below_zero() -> None:
    records = [StepRecord(StepWork(0, decodes, 0, 0), 0.1 - 0.001 * decodes) for decodes in range(1, 40)]
    fitted = CostModel.fit(records)
    assert min(coefficients(fitted)) >= 0.0
    assert fitted.per_decode == 0.0
    assert fitted.per_step == pytest.approx(0.08, rel=0.05)


def test_one_record_is_enough() -> None:
    work = StepWork(0, 1, 100, 0)
    assert CostModel.fit([StepRecord(work, 0.5)])(work) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "records", [[], [StepRecord(StepWork(0, 1, 1, 0), 0.0)], [StepRecord(StepWork(0, 1, 1, 0), float("nan"))]]
)
def test_what_cannot_be_fitted(records: list[StepRecord]) -> None:
    with pytest.raises(ConfigError, match=r"measured step"):
        CostModel.fit(records)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    fitted = CostModel.fit([StepRecord(work, KNOWN(work)) for work in some_work(50)], description="here")
    for model in (fitted, KNOWN, CostModel.illustrative()):
        model.save(path)
        assert CostModel.load(path) == model


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "per_stop": 3}', '{"format": 1}', '{"format": 1, "per_step": "x"}']
)
def test_a_file_that_is_no_cost_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json: is no cost model|per_step"):
        CostModel.load(path)


def test_a_later_format_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"format": 99, "per_step": 1.0}))
    with pytest.raises(ConfigError, match="format 99"):
        CostModel.load(path)
    with pytest.raises(ConfigError, match="--measure MODEL"):
        CostModel.load(tmp_path / "none.json")


@pytest.mark.parametrize("values", [(0.0,), (-1.0,), (float("inf"),), (1.0, -1e-9)])
def test_impossible_coefficients(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        CostModel(*values)


def test_the_work_of_a_batch() -> None:
    scheduler = Scheduler(4, 12, 32, 4, -1, enable_chunked_prefill=True)
    scheduler.add_sequence(Sequence([1, 2, 3], request_id="a"))
    batch, _ = scheduler.schedule()
    assert StepWork.of(batch) == StepWork(3, 0, 0, 1 + 2 + 3)
    scheduler.postprocess(batch, [9])
    scheduler.add_sequence(Sequence(list(range(20, 40)), request_id="b"))
    batch, _ = scheduler.schedule()
    assert StepWork.of(batch) == StepWork(11, 1, 4, 11 * 12 // 2)
    scheduler.postprocess(batch, [9, 0])
    batch, _ = scheduler.schedule()
    assert StepWork.of(batch) == StepWork(9, 1, 5, 9 * 11 + 9 * 10 // 2)
