"""Our decoders against transformers on the same random weights (trials F09): prefill, chunks, decode, batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SHAPES, Driver, load_directory, reference_logits, reference_model

TOLERANCE = 1e-4
TOKENS = torch.randint(3, 97, (48,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' model, ours from what it saved, and where that is."""
    reference = reference_model(*SHAPES[request.param])
    directory: Path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(directory)
    return reference, load_directory(directory), directory


@pytest.mark.parametrize("chunks", [[48], [1] * 48, [7] * 6 + [6], [17, 1, 30], [40] + [1] * 8], ids=str)
def test_prefill_chunks_and_decode_equal_transformers(pair: Any, chunks: list[int]) -> None:
    reference, loaded, _ = pair
    logits = Driver(loaded).run(TOKENS, chunks)
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=TOLERANCE, rtol=0)


def test_rows_of_a_batch_equal_each_alone(pair: Any) -> None:
    """Chunk, decode and prefill side by side: nobody sees a neighbour."""
    reference, loaded, _ = pair
    prompts = [TOKENS[:13], TOKENS[5:6], TOKENS[20:48], TOKENS[9:18]]
    driver = Driver(loaded)
    tables = [driver.table(40) for _ in prompts]
    first = driver.step([prompt[:6] for prompt in prompts], [0] * 4, tables)
    rest = [[*prompt[6:], 11] for prompt in prompts]
    second = driver.step(rest, [min(6, len(prompt)) for prompt in prompts], tables)
    for prompt, *got in zip(prompts, first, second, strict=True):
        torch.testing.assert_close(torch.cat(got), reference_logits(reference, [*prompt, 11]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunks", [[0], [5], [5, 1, 1]], ids=str)
def test_a_warm_prefix_gives_the_logits_of_a_cold_run(pair: Any, chunks: list[int]) -> None:
    """Trials B08: a second sequence reads another's blocks and computes the rest, at once or in pieces, at its true positions."""
    _, loaded, _ = pair
    for length in (9, 14, 33):
        driver = Driver(loaded)  # blocks of 4
        tokens = TOKENS[:length]
        table = driver.table(length)
        [cold] = driver.step([tokens], [0], [table])
        cached = (length - 1) // 4 * 4
        warm, start = [], cached
        shared = [*table[: cached // 4], *driver.table(length - cached)]
        for size in [*chunks, length]:
            if piece := tokens[start : start + size]:
                warm += driver.step([piece], [start], [shared])
                start += len(piece)
        torch.testing.assert_close(torch.cat(warm), cold[cached:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_block_size(pair: Any, block_size: int) -> None:
    reference, loaded, _ = pair
    logits = Driver(loaded, block_size=block_size).run(TOKENS, [20, 1, 27])
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_and_gives_float32_logits(pair: Any, dtype: torch.dtype) -> None:
    """Positions stay in float32 whatever the weights are: at bfloat16, position 257 would be rounded to 256."""
    reference, _, directory = pair
    loaded = load_directory(directory, dtype=str(dtype).removeprefix("torch."))
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {dtype}
    assert loaded.module.model.rotary.cos_sin.dtype == torch.float32
    logits = Driver(loaded).run(TOKENS, [40, 1, 7])
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, TOKENS)
    assert (logits - expected).norm() < 0.05 * expected.norm()
