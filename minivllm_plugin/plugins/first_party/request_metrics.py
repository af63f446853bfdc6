"""What an engine is measured by: vLLM's counters and histograms, gathered from the records that observers receive.

Owns the numbers. The engine thread writes them; any thread may read them while it does. A counter then is never wrong, a
histogram's sum may lack the observation that is being made. Knows no exporter and no library.

Names, meanings and buckets follow vLLM's v1 metrics (https://docs.vllm.ai/en/stable/usage/metrics/), without its prefix.
"""

from bisect import bisect_left
from collections.abc import Sequence

from minivllm_plugin.events import RequestOutcome, StepReport
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["FINISHED_REASONS", "Histogram", "RequestMetrics", "token_buckets"]

# Of requests that were queued; a policy's refusals are counted apart, as in vLLM.
FINISHED_REASONS = ("stop", "length", "abort", "error")

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to ``most`` tokens, at least (1,)."""
    bounds = [1]
    while True:
        scale = 10 ** (len(bounds) // 3)
        following = (1, 2, 5)[len(bounds) % 3] * scale
        if following > most:
            return tuple(bounds)
        bounds.append(following)


class Histogram:
    """Observations counted by bucket.

    Args:
        documentation: one sentence, with the unit.
        bounds: upper bounds of the buckets, inclusive, ascending; one without a bound follows.

    Attributes:
        counts: of each bucket alone, not of those below it.
        total: sum of all observations.
    """

    __slots__ = ("bounds", "counts", "documentation", "total")

    def __init__(self, documentation: str, bounds: Sequence[float]) -> None:
        self.documentation = documentation
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _LiveRequest:
    """What has to be remembered of a request until it ends; times on the engine's clock."""

    __slots__ = ("arrival_time", "num_prompt_tokens", "token_time")

    def __init__(self, arrival_time: float, num_prompt_tokens: int) -> None:
        self.arrival_time = arrival_time
        self.num_prompt_tokens = num_prompt_tokens
        self.token_time: float | None = None  # when it gained its latest token


class RequestMetrics:
    """Counters and histograms of one engine.

    Args:
        max_model_len: longest request, in tokens: sets the buckets of lengths.

    Attributes:
        latest: the state after the latest step or arrival; None before the first one.
        histograms: name -> histogram.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = token_buckets(max_model_len)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_rejected = 0
        self.finished: dict[str, int] = dict.fromkeys(FINISHED_REASONS, 0)
        self.latest: EngineState | None = None
        self.step_tokens = Histogram("Tokens computed in one step.", STEP_TOKENS)
        self.time_to_first_token = Histogram("Seconds from queued to the first token.", FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram("Seconds from one step that gave a request tokens to the next.", TOKEN_SECONDS)
        self.time_per_output_token = Histogram("Seconds a token after the first one, mean of one request.", TOKEN_SECONDS)
        self.e2e_latency = Histogram("Seconds from queued to the end.", REQUEST_SECONDS)
        self.queue_time = Histogram("Seconds from queued to first scheduled.", REQUEST_SECONDS)
        self.prefill_time = Histogram("Seconds from first scheduled to the first token.", REQUEST_SECONDS)
        self.decode_time = Histogram("Seconds from the first token to the end.", REQUEST_SECONDS)
        self.inference_time = Histogram("Seconds from first scheduled to the end.", REQUEST_SECONDS)
        self.prompt_length = Histogram("Prompt tokens of one request.", lengths)
        self.completion_length = Histogram("Generated tokens of one request.", lengths)
        self.max_tokens = Histogram("max_tokens of one request that set it.", lengths)
        self.computed_prompt = Histogram("Prompt tokens of one request that the prefix cache did not hold.", lengths)
        self.histograms: dict[str, Histogram] = {
            "iteration_tokens_total": self.step_tokens,
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "request_time_per_output_token_seconds": self.time_per_output_token,
            "e2e_request_latency_seconds": self.e2e_latency,
            "request_queue_time_seconds": self.queue_time,
            "request_prefill_time_seconds": self.prefill_time,
            "request_decode_time_seconds": self.decode_time,
            "request_inference_time_seconds": self.inference_time,
            "request_prompt_tokens": self.prompt_length,
            "request_generation_tokens": self.completion_length,
            "request_params_max_tokens": self.max_tokens,
            "request_prefill_kv_computed_tokens": self.computed_prompt,
        }
        self._live: dict[str, _LiveRequest] = {}

    def queued(self, request: RequestView, state: EngineState) -> None:
        self._live[request.request_id] = _LiveRequest(request.arrival_time, request.num_prompt_tokens)
        self.latest = state

    def step(self, report: StepReport) -> None:
        """One step; what it costs grows with the requests that gained a token, and nothing else."""
        now = report.state.now
        self.latest = report.state
        self.step_tokens.observe(report.num_batched_tokens)
        self.num_generation_tokens += len(report.request_ids)
        live = self._live
        for request_id in dict.fromkeys(report.request_ids):  # once where guesses gave it several tokens: as in vLLM, one wait
            request = live.get(request_id)
            if request is None:  # queued before anybody listened
                continue
            if request.token_time is None:
                # As in vLLM a prompt counts when it is done, cached tokens included; one preempted in mid-prompt counts once.
                self.num_prompt_tokens += request.num_prompt_tokens
                self.time_to_first_token.observe(now - request.arrival_time)
            else:
                self.inter_token_latency.observe(now - request.token_time)
            request.token_time = now

    def ended(self, request: RequestView, outcome: RequestOutcome) -> None:
        self._live.pop(request.request_id, None)
        if outcome.reason == "rejected":
            self.num_rejected += 1
            return
        self.finished[outcome.reason] += 1
        self.e2e_latency.observe(outcome.finished_time - request.arrival_time)
        self.prompt_length.observe(outcome.num_prompt_tokens)
        self.completion_length.observe(outcome.num_completion_tokens)
        if request.max_tokens is not None:
            self.max_tokens.observe(request.max_tokens)
        queue, prefill, decode = outcome.queue_seconds, outcome.prefill_seconds, outcome.decode_seconds
        if queue is not None:
            self.queue_time.observe(queue)
        if prefill is not None and decode is not None:  # it had a first token
            self.prefill_time.observe(prefill)
            self.decode_time.observe(decode)
            self.inference_time.observe(prefill + decode)
            self.computed_prompt.observe(outcome.num_prompt_tokens - outcome.num_cached_tokens)
            if outcome.num_completion_tokens > 1:
                self.time_per_output_token.observe(decode / (outcome.num_completion_tokens - 1))
