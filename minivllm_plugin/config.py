"""How one engine is set up. Frozen and validated; knows no torch. The model's own limits are applied when it is loaded."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from minivllm_plugin.errors import ConfigError

__all__ = ["KV_CACHE_DTYPES", "CudaGraphs", "EngineConfig", "SchedulingPolicy", "check_integer"]

SchedulingPolicy = Literal["fcfs", "priority"]
CudaGraphs = Literal["lazy", "full", "off"]
MAX_THREADS = 1024  # each has its own stack and scratch: a wrong number here takes all memory, not a little time
DTYPE_NAMES = {
    **{name: name for name in ("auto", "float32", "bfloat16", "float16")},
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
}
KV_CACHE_DTYPES = {
    **{name: name for name in ("auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2")},
    "fp8": "fp8_e4m3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        model: catalog name, hub id, directory or ``.gguf`` file.
        dtype: of weights and KV cache. ``auto`` is the checkpoint's on a GPU and leaves the choice to ``quantization`` on a
            CPU. ``float32`` is exact: greedy tokens equal transformers' in float32.
        quantization: ``int8`` makes weights of one byte when the model is loaded (CPU only), ``int4`` of five bits (embedding and
            output layer: one byte), which is faster for one or two requests at a time; ``none`` keeps them; ``auto`` is
            ``int8`` on a CPU whose compiler builds our kernels, unless a ``dtype`` is asked for.
        kv_cache_dtype: ``auto`` is the weights' on a GPU and in plain torch; in the CPU kernels bfloat16, or float32 with
            ``dtype="float32"``. ``float32`` and ``bfloat16`` go everywhere; ``float16``, ``fp8_e4m3`` (or ``fp8``) and
            ``fp8_e5m2`` only where the CPU kernels do not compute, ``int8`` only there.
        num_threads: threads of the CPU kernels, at most 1024; None takes as many as torch does.
        device: ``auto`` (cuda if there is one, else cpu), ``cpu``, ``cuda``, ``cuda:1``, …
        load_format: ``auto`` reads files; ``dummy`` gives seeded random weights with no file and no network.
        max_model_len: context window in tokens; None takes the model's own, bounded by the pool.
        max_num_sequences: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool; excludes ``kv_cache_bytes``.
        kv_cache_bytes: memory for the pool; None takes, on a CUDA device, what ``gpu_memory_utilization`` leaves, elsewhere
            room for twice the window or 16,384 tokens, at most 1 GiB or an eighth of the machine's memory.
        gpu_memory_utilization: share of a CUDA device's memory for weights, the largest batch, graphs and the pool together,
            above 0 and at most 1.
        tensor_parallel_size: processes that share the model, each with a part of every layer and of the pool: CUDA devices from
            ``device`` on, or several processes on the CPU. ``kv_cache_bytes`` and ``gpu_memory_utilization`` are each process's.
        enforce_eager: no CUDA graphs; the same as ``cuda_graphs="off"``.
        cuda_graphs: of decode steps: ``lazy`` captures a batch size when it is first met, ``full`` all sizes at start-up,
            ``off`` none. Looked at on CUDA devices only.
        num_speculative_tokens: most tokens of one request that are guessed from its own text in a step and verified beside its
            newest one (prompt lookup). It changes how fast tokens come, never which. None is 7 with the CPU kernels, whose rows
            have the same bits in any company, and 0 elsewhere; 0 guesses nothing.
        async_scheduling: schedule and launch each batch before the tokens of the one before it are known, so that the device does
            not wait for the host. None does so on a GPU. It changes how fast tokens come, never which.
        enable_prefix_caching: share the K/V of equal prefixes.
        enable_chunked_prefill: compute long prompts in pieces beside running requests.
        max_queue_size: most requests that wait beyond those that run; one more is refused.
        scheduling_policy: ``fcfs`` or ``priority``.
        tool_call_parser: format of the model's tool calls: ``auto`` (from its chat template), ``none``, ``hermes``, ``json``, or
            one that a plugin brings.
        reasoning_parser: format of its reasoning: ``auto``, ``none``, ``think``, or one that a plugin brings.
        pooling: of embeddings: ``last`` (the hidden state of the last token), ``mean``, or ``auto``: what the model's
            ``1_Pooling/config.json`` says, else ``last``.
        plugins: installed plugins by name, or objects, beside the installed ones that load by themselves.
        policies: plugins, by name or as objects, that may steer the scheduler; the first named is asked first. A plugin that is
            not named here only watches.
        block_plugins: names of installed plugins to leave out.
        plugin_errors: ``isolate`` counts what plugins raise and goes on without them; ``raise`` ends the engine: for tests.
        plugin_budget: share of a step that one hook of one plugin may take before it is moved off the engine thread
            (observers) or taken out (policies).
        seed: of dummy weights.
        revision: of a hub model.
        chat_template: replaces the model's own: Jinja text, or the name of one of the model's templates or of a plugin's.

    Raises:
        ConfigError: naming the field, its value and what is allowed.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    cuda_graphs: CudaGraphs = "lazy"
    num_speculative_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_queue_size: int = 1024
    scheduling_policy: SchedulingPolicy = "fcfs"
    seed: int = 0
    revision: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    pooling: str = "auto"
    plugins: tuple[object, ...] = ()
    policies: tuple[object, ...] = ()
    block_plugins: tuple[str, ...] = ()
    plugin_errors: str = "isolate"
    plugin_budget: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError(f"model must be a name or a path, got {self.model!r}")
        object.__setattr__(self, "dtype", _choice("dtype", _dtype_name(self.dtype), DTYPE_NAMES))
        _choice("quantization", self.quantization, ("auto", "none", "int8", "int4"))
        object.__setattr__(
            self, "kv_cache_dtype", KV_CACHE_DTYPES[str(_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES))]
        )
        _choice("cuda_graphs", self.cuda_graphs, ("lazy", "full", "off"))
        _choice("pooling", self.pooling, ("auto", "last", "mean"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(
                f"scheduling_policy must be one of fcfs, priority, got {self.scheduling_policy!r}; a plugin's policy is named in "
                "policies, such as policies=['sjf']"
            )
        if not isinstance(self.device, str) or self.device.split(":")[0] not in ("auto", "cpu", "cuda", "mps", "xpu"):
            raise ConfigError(f"device must be auto, cpu, cuda, mps or xpu (cuda:1 for the second), got {self.device!r}")
        for name, at_least in (("max_num_sequences", 1), ("max_num_batched_tokens", 1), ("block_size", 1), ("max_queue_size", 0)):
            check_integer(name, getattr(self, name), at_least=at_least)
        for name in ("max_model_len", "num_blocks", "kv_cache_bytes", "num_threads"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=1)
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads={self.num_threads} must be at most {MAX_THREADS}; leave it out for one a core")
        check_integer("seed", self.seed, at_least=0)
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(f"async_scheduling must be True, False or None, got {self.async_scheduling!r}")
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, at_least=0)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, at_least=1)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and kv_cache_bytes={self.kv_cache_bytes} both set the pool; give one"
            )
        for name in ("plugins", "policies", "block_plugins"):
            object.__setattr__(self, name, _sequence(name, getattr(self, name), only_names=name == "block_plugins"))
        for name in ("tool_call_parser", "reasoning_parser"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} must be auto, none or a parser's name, got {getattr(self, name)!r:.100}")
        _choice("plugin_errors", self.plugin_errors, ("isolate", "raise"))
        _share("plugin_budget", self.plugin_budget, "a step")
        _share("gpu_memory_utilization", self.gpu_memory_utilization, "the device's memory")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not self.enable_chunked_prefill and self.max_model_len and self.max_model_len > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is greater than max_num_batched_tokens={self.max_num_batched_tokens}: "
                "without chunked prefill a prompt is computed in one step; raise the latter or leave enable_chunked_prefill on"
            )

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> "EngineConfig":
        """From keyword arguments, refusing unknown ones by name. With ``model`` among them, the first name is an alias."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown engine option {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**{"model": model, **options})


def _dtype_name(value: object) -> object:
    name = str(value).removeprefix("torch.") if not isinstance(value, str) and type(value).__module__ == "torch" else value
    return DTYPE_NAMES.get(name, name) if isinstance(name, str) else name


def _choice(name: str, value: object, allowed: Any) -> object:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _share(name: str, value: object, whole: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be a share of {whole} above 0 and at most 1, got {value!r}")


def _sequence(name: str, value: object, *, only_names: bool) -> tuple[object, ...]:
    what = "names" if only_names else "names or objects"
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list of {what}, got {value!r:.100}")
    for entry in value:
        if (isinstance(entry, str) and not entry.strip()) or (only_names and not isinstance(entry, str)) or entry is None:
            raise ConfigError(f"{name} must hold {what}, got {entry!r:.100}")
        if isinstance(entry, type):
            raise ConfigError(f"{name} has the class {entry.__name__}; pass an object of it: {entry.__name__}()")
    return tuple(value)


def check_integer(name: str, value: object, *, at_least: int) -> int:
    """``value``, an integer of at least ``at_least``.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    return value
