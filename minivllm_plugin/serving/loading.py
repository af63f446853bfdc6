"""From an EngineConfig to a running engine: files fetched, weights read, pool sized, scheduler and runner tied together.

The one place where model limits and engine settings meet.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine, Runner
from minivllm_plugin.engine.prompt_lookup import PromptLookup
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Pooling
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.models.catalog import ModelSource, catalog_entry, resolve
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Loaded", "load", "speculation_of"]

logger = logging.getLogger(__name__)

DEFAULT_SPECULATIVE_TOKENS = 7
NO_EOS = -1  # equal to no token: a model whose files name no end token runs until max_tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading leaves behind for the serving side; the engine itself stays on its thread."""

    limits: Limits
    tokenizer: Tokenizer | None
    generation_defaults: Mapping[str, float]
    num_blocks: int
    device: str
    dtype: str
    kernels: str = "torch"
    chat_template: str | None = None  # of the setting: Jinja text or the name of one of the model's own
    pooling: Pooling = "last"


def load(config: EngineConfig, extensions: Extensions | None = None) -> tuple[LLMEngine, Loaded]:
    """Build the engine. Runs on the engine thread; imports torch only here.

    Args:
        extensions: architectures, kernel backends, weight loaders and chat templates; None has the built-in ones. What runs per
            request is attached afterwards: ``extensions.attach(engine, loaded.tokenizer)``.

    Raises:
        ConfigError: a setting does not go with the model.
        ModelError: the model cannot be had.
    """
    extensions = extensions or Extensions.builtin()
    source = _source(config, extensions)  # before torch: a misspelt name should not cost its import
    from minivllm_plugin.models.loader import describe_model
    from minivllm_plugin.runner.backends import build_backend

    device = _device(config.device)
    compiling = _compile_kernels(device)  # beside the conversion of a model that is new here
    try:
        description = describe_model(source, load_format=config.load_format, extensions=extensions)
    finally:
        compiling.join()
    model = description.config
    _check_window(config, model.max_position_embeddings)
    directory = description.tokenizer_directory
    tokenizer = Tokenizer.load(directory) if directory is not None else None
    template = extensions.parsers.chat_template(config.chat_template, tuple(tokenizer.chat_templates) if tokenizer else ())
    ends = tuple(dict.fromkeys((*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))))

    backend = build_backend(config, source, description, device, ends, extensions)
    scheduler = Scheduler(
        config.max_num_sequences,
        config.max_num_batched_tokens,
        backend.num_blocks,
        config.block_size,
        ends[0] if ends else NO_EOS,
        end_token_ids=ends[1:],
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
    )
    scheduler.speculation = speculation_of(config, backend.runner)
    window = min(config.max_model_len or model.max_position_embeddings, backend.num_blocks * config.block_size)
    if not config.enable_chunked_prefill:
        window = min(window, config.max_num_batched_tokens)
    limits = Limits(vocab_size=model.vocab_size, max_model_len=window)
    logger.info(
        "%s on %s (%s kernels, %s weights): %d KV blocks of %d tokens (%d MiB), context window %d of the model's %d",
        config.model,
        device,
        backend.kernels,
        backend.dtype,
        backend.num_blocks,
        config.block_size,
        backend.cache_bytes >> 20,
        window,
        model.max_position_embeddings,
    )
    encode = tokenizer.encode if tokenizer else None
    engine = LLMEngine(scheduler, backend.runner, limits, encode, asynchronous=_asynchronous(config, backend.runner, device))
    entry = catalog_entry(config.model)
    defaults = {**(entry.sampling if entry else {}), **description.generation_defaults}  # the checkpoint's own word counts more
    loaded = Loaded(
        limits,
        tokenizer,
        defaults,
        backend.num_blocks,
        device,
        backend.dtype,
        backend.kernels,
        template,
        _pooling(config, description.directory),
    )
    return engine, loaded


def _asynchronous(config: EngineConfig, runner: Runner, device: str) -> bool:
    """Whether the next batch is launched while one is computed.

    Raises:
        ConfigError: it is asked for, and the runner cannot.
    """
    can_launch = hasattr(runner, "launch")
    if config.async_scheduling and not can_launch:
        raise ConfigError(
            "async_scheduling=True needs a runner on a device of its own; the one chosen here computes a batch while it is "
            "asked to: leave it out"
        )
    return can_launch and (device.startswith("cuda") if config.async_scheduling is None else config.async_scheduling)


def speculation_of(config: EngineConfig, runner: Runner) -> PromptLookup | None:
    """Who guesses tokens, if anybody does.

    Raises:
        ConfigError: guesses are asked for, and the runner cannot verify them.
    """
    most = config.num_speculative_tokens
    if not getattr(runner, "can_speculate", False):
        if most:
            raise ConfigError(
                f"num_speculative_tokens={most} needs the compiled CPU kernels, which give a row the same bits in any company; "
                "they do not compute this model here: leave it out"
            )
        return None
    most = DEFAULT_SPECULATIVE_TOKENS if most is None else most
    return PromptLookup(most) if most else None


def _pooling(config: EngineConfig, directory: Path | None) -> Pooling:
    """How embeddings are pooled: as asked for, else as the model's sentence-transformers files say, else by the last token.

    Raises:
        ConfigError: the files ask for another kind.
    """
    if config.pooling in ("last", "mean"):
        return "mean" if config.pooling == "mean" else "last"
    path = None if directory is None else directory / "1_Pooling" / "config.json"
    if path is None or not path.is_file():
        return "last"
    from minivllm_plugin.models.checkpoint import read_json

    modes = [name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value is True]
    if modes == ["pooling_mode_mean_tokens"]:
        return "mean"
    if modes in (["pooling_mode_lasttoken"], []):
        return "last"
    raise ConfigError(
        f"{path} asks for {', '.join(modes)}; supported are the last token and the mean: set pooling= to one of them"
    )


def _source(config: EngineConfig, extensions: Extensions) -> ModelSource:
    """What the model's name stands for: a file that a plugin reads, or anything that we know ourselves."""
    path = Path(config.model).expanduser()
    if extensions.weights.suffix_of(config.model) is not None and path.is_file():
        return ModelSource(config.model, "file", str(path.resolve()))
    return resolve(config.model, revision=config.revision)


def _compile_kernels(device: str) -> threading.Thread:
    """Have the CPU kernels built, if they are wanted and not there yet; whether it worked is asked later."""
    from minivllm_kernels.dispatch import why_not

    thread = threading.Thread(target=why_not, args=("cpu", device), name="minivllm-kernel-build", daemon=True)
    thread.start()
    return thread


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device; use device='cpu' or install a CUDA build of torch")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch says to a device that it lacks depends on the kind
        raise ConfigError(f"device={device!r} cannot be used by this torch ({error!s:.200}); use device='cpu'") from error
    return device


def _check_window(config: EngineConfig, model_max: int) -> None:
    if config.max_model_len is not None and config.max_model_len > model_max:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is greater than the {model_max} positions of {config.model!r}; lower it"
        )
