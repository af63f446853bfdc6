"""Pictures as bytes, and the past."""

from minivllm_ui.frames import decode, encode, encode_ids
from minivllm_ui.history import SPAN, History, Sample


def test_a_frame_survives_the_wire() -> None:
    header = {"num_blocks": 5, "sequences": [{"blocks": 2}, {"blocks": 0}, {"blocks": 1}], "text": "grüß"}
    data = encode(header, bytes([0, 1, 2, 3, 9]), bytes([0, 0, 2, 1, 1]), [[2, 70_000], [], [4]]) + encode_ids([1])
    frame = decode(data)
    assert frame.header == header
    assert frame.state == bytes([0, 1, 2, 3, 9])
    assert frame.holders == bytes([0, 0, 2, 1, 1])
    assert frame.tables == [[2, 70_000], [], [4]]
    assert frame.left_behind == [1]


def _sample(time: float) -> Sample:
    return Sample(time, 0, 0, 0, 8, 0, 0.0)


def test_the_past_gives_what_was_on_show_and_forgets() -> None:
    history = History()
    assert history.at(0.0) is None
    for time in range(10):
        history.add(_sample(float(time)), b"frame %d" % time)
    assert history.at(4.5) == b"frame 4"
    assert history.at(-1.0) == b"frame 0"
    assert history.at(99.0) == b"frame 9"
    history.add(_sample(SPAN + 5.5), b"late")
    assert [sample.time for sample in history.samples()] == [6.0, 7.0, 8.0, 9.0, SPAN + 5.5]
