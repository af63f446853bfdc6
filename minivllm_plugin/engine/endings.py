"""When a sequence ends, and how long it can get before it must. Reads sequences, changes only their ``stop_reason``.

No state; the Scheduler asks after every token, on the engine thread. Stop strings are the stream's, deadlines the service's.
"""

from collections.abc import Callable, Collection

from minivllm_plugin.engine.sequence import FinishReason, Sequence
from minivllm_plugin.errors import RequestFailedError

__all__ = ["ask_stop_check", "end_reason", "is_full", "may_outgrow"]


def end_reason(seq: Sequence, token_id: int, end_token_ids: Collection[int], num_slots: int) -> FinishReason | None:
    """Why ``seq`` ends with ``token_id``, its newest one; None if it goes on. ``num_slots``: tokens that the whole pool holds."""
    params = seq.sampling_params
    if seq.num_completion_tokens >= params.min_tokens:
        if token_id in end_token_ids and not seq.ignore_eos:
            return "stop"
        if token_id in (params.stop_token_ids or ()):
            seq.stop_reason = token_id
            return "stop"
    return "length" if is_full(seq, num_slots, 0) else None


def is_full(seq: Sequence, num_slots: int, num_pending: int) -> bool:
    """Whether ``seq``, with that many tokens that are still to come, has all that it may have. ``num_slots``: as above."""
    if seq.max_tokens is not None and seq.num_completion_tokens + num_pending >= seq.max_tokens:
        return True
    length = seq.num_tokens + num_pending
    if seq.max_model_length is not None and length >= seq.max_model_length:
        return True
    return length > num_slots  # even alone in the pool its newest token would find no slot


def ask_stop_check(stop_check: Callable[[Sequence], str | None], seq: Sequence) -> FinishReason | None:
    """What an extension says to the newest token; see ``Scheduler.stop_check``."""
    if seq.num_completion_tokens < seq.sampling_params.min_tokens:
        return None
    try:
        seq.stop_reason = stop_check(seq)
    except RequestFailedError:  # whoever raised it keeps the cause
        return "error"
    return None if seq.stop_reason is None else "stop"


def may_outgrow(seq: Sequence, num_slots: int) -> bool:
    """Whether ``seq`` can reach a length for which that many slots are too few. Its very last token needs none."""
    if seq.max_tokens is None and seq.max_model_length is None:
        return True
    ends = [] if seq.max_tokens is None else [seq.num_prompt_tokens + seq.max_tokens]
    if seq.max_model_length is not None:
        ends.append(seq.max_model_length)
    return min(ends) - 1 > num_slots
