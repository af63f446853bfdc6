"""Part: transformers' continuous batching on the same requests as this engine, where transformers is installed and can."""

import random
import time
from typing import Any

import torch

from minivllm_plugin.bench.gpu.engines import MODEL, TINY, model_to_measure, opened
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.models.catalog import CATALOG
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["run"]


def run(given: Given, record: Recorder) -> None:
    """Output tokens a second of both, greedy, every request of one length since transformers takes one for all."""
    count, output, longest = (3, 4, 10) if given.rehearse else (64, 128, 512)
    rng = random.Random(5)
    warm, prompts = (
        [[rng.randrange(5, 990) for _ in range(rng.randint(longest // 4, longest))] for _ in range(count)] for _ in range(2)
    )
    options = {"dtype": "bfloat16", "max_num_sequences": count, "max_num_batched_tokens": 16384, "max_model_len": 1024}
    if given.rehearse:
        options |= {"max_model_len": 64, "num_blocks": 30}
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    with model_to_measure(given) as model, opened(model, given, **options) as (llm, _):
        llm.generate(warm, params, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        ours = count * output / (time.perf_counter() - began)
    title = f"{count} requests of {longest // 4}-{longest} tokens, {output} out"
    record.figure(f"this engine, {title}", ours, "output tok/s")
    try:
        theirs = _transformers(warm, prompts, output, given)
    except Exception as error:  # not installed, another version, no kernel for this card: its matter, not ours
        record.note(f"transformers does not take part: {type(error).__name__}: {error!s:.300}")
        return
    record.figure(f"transformers, {title}", theirs, "output tok/s")
    record.figure("this engine beside transformers", ours / theirs, "times", 1.0, "at least")


def _transformers(warm: list[list[int]], prompts: list[list[int]], output: int, given: Given) -> float:
    import transformers

    kit: Any = transformers  # which has types for a part of this only
    fields: dict[str, Any] = dict(TINY["qwen3"] if given.rehearse else CATALOG[MODEL].architecture)
    config = kit.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(given.device):
        model: Any = kit.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    options: dict[str, Any] = {"generation_config": kit.GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1)}
    if given.rehearse:  # it would take most of the machine's memory
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    model.generate_batch(warm, **options)
    began = time.perf_counter()
    results = model.generate_batch(prompts, **options)
    seconds = time.perf_counter() - began
    made = sum(len(result.generated_tokens) for result in results.values())
    if made != len(prompts) * output:
        raise RuntimeError(f"it made {made} tokens of {len(prompts) * output}")
    return made / seconds
