"""What goes through the pipes: batches of any shape arrive as they were sent, and a pipe that ends in the middle is an end."""

import io
import random

import pytest

from minivllm_plugin.parallel.messages import Answer, decode_layout, encode_layout, read_frame, write_frame
from minivllm_plugin.runner.rows import LogitRows
from minivllm_plugin.runner.step_layout import StepLayout

FAR_SLOT = 2**33  # a pool of more slots than 32 bits count


def random_layout(rng: random.Random) -> StepLayout:
    count = rng.choice((0, 1, 2, 9))
    query_lens = [rng.choice((1, 1, 5, 40)) for _ in range(count)]
    total = sum(query_lens)
    return StepLayout(
        token_ids=[rng.randrange(2**31) for _ in range(total)],
        positions=[rng.randrange(2**20) for _ in range(total)],
        slots=[rng.choice((-1, rng.randrange(FAR_SLOT))) for _ in range(total)],
        sources=[],
        query_lens=tuple(query_lens),
        seq_lens=tuple(length + rng.randrange(100) for length in query_lens),
        block_tables=[[rng.randrange(2**31) for _ in range(rng.randrange(30))] for _ in range(count)],
        wanted=LogitRows.of_rows(sorted(rng.sample(range(total), rng.randrange(total + 1)))),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_arrives_as_it_was_sent(seed: int) -> None:
    layout = random_layout(random.Random(seed))
    assert decode_layout(encode_layout(layout)) == layout


def test_frames_come_one_by_one_until_the_pipe_is_closed() -> None:
    pipe = io.BytesIO()
    payloads = [b"", b"a", bytes(100_000)]
    for payload in payloads:
        write_frame(pipe, payload)
    whole = pipe.getvalue()
    assert [read_frame(source) for source in [io.BytesIO(whole)] for _ in range(4)] == [*payloads, None]
    for length in (0, 1, 3, 4 + 0 + 2, len(whole) - 1):  # cut off anywhere
        source = io.BytesIO(whole[:length])
        frames = []
        while (frame := read_frame(source)) is not None:
            frames.append(frame)
        assert frames == payloads[: len(frames)]
        assert len(frames) < len(payloads)


def test_answers() -> None:
    for answer in (Answer(), Answer(num_blocks=7), Answer(error="ConfigError", message='a "quoted" …\nline')):
        assert Answer.from_bytes(answer.to_bytes()) == answer
