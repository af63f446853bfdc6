"""The workload is the same on every machine, or figures could not be compared."""

from minivllm_plugin.bench.workload import offline_workload, prefill_prompt, prefix_workload, warm_up_prompt

FIRST_IDS = (6316, 6895, 668, 4247, 8381, 7966, 6639, 4974)  # of seed 0, as the shared generator of all peers gives them


def test_seed_0_gives_the_known_prompts() -> None:
    work = offline_workload(32)
    assert work.prompts[0][:8] == FIRST_IDS
    assert [len(prompt) for prompt in work.prompts[:4]] == [248, 246, 93, 209]
    assert work.output_lengths[:4] == (75, 37, 39, 76)
    assert (work.num_input_tokens, work.num_output_tokens) == (5094, 2580)


def test_lengths_and_ids_stay_in_range() -> None:
    work = offline_workload(64, seed=3, last_token_id=40)
    assert all(32 <= len(prompt) <= 256 for prompt in work.prompts)
    assert all(32 <= length <= 128 for length in work.output_lengths)
    assert {min(map(min, work.prompts)), max(map(max, work.prompts))} == {5, 40}
    assert offline_workload(64, seed=3, last_token_id=40) == work
    assert offline_workload(64, seed=4, last_token_id=40) != work


def test_a_single_prompt_is_32_in_and_128_out() -> None:
    work = offline_workload(1)
    assert work.prompts == (offline_workload(1).prompts[0],)
    assert len(work.prompts[0]) == 32
    assert work.prompts[0][:8] == FIRST_IDS
    assert work.output_lengths == (128,)


def test_prefix_workload_shares_exactly_the_prefix() -> None:
    work = prefix_workload(4, shared=50, own=6, output=7)
    assert {len(prompt) for prompt in work.prompts} == {56}
    assert len({prompt[:50] for prompt in work.prompts}) == 1
    assert len({prompt[50] for prompt in work.prompts}) > 1
    assert work.output_lengths == (7,) * 4


def test_the_long_prompt_does_not_repeat_and_nothing_begins_like_the_warm_up() -> None:
    assert prefill_prompt(3) == (5, 12, 19)
    assert len(set(prefill_prompt(512))) == 512
    assert max(prefill_prompt(2000, last_token_id=99)) <= 99
    others = [*offline_workload(32).prompts, *prefix_workload(2).prompts, prefill_prompt(64)]
    assert not any(prompt[:3] == warm_up_prompt()[:3] for prompt in others)
