"""What sampling parameters mean, written out in plain Python, one token at a time; and requests with any of them.

The definitions are vLLM's, in vLLM's order: allowed tokens, bad words, min_tokens, bias, repetition, frequency and presence
penalty; then temperature, min_p, top_k, top_p.
"""

import math

from hypothesis import strategies as st

from minivllm_plugin import SamplingParams

__all__ = ["ENDS", "VOCAB", "defined", "distribution", "filters", "requests", "some_tokens", "token_ids"]

VOCAB = 23
ENDS = (0, 1)
token_ids = st.integers(0, VOCAB - 1)
some_tokens = st.lists(token_ids, min_size=1, max_size=4)
requests = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(token_ids, min_size=3, max_size=12),
        "bad_words_token_ids": st.lists(some_tokens, max_size=5),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(2, VOCAB - 1), max_size=2),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(token_ids, st.floats(-200, 200), max_size=4),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 5),
    },
)
filters = st.fixed_dictionaries(
    {"temperature": st.floats(0.1, 3)},
    optional={"top_k": st.integers(-1, VOCAB), "top_p": st.floats(0.05, 1), "min_p": st.floats(0, 1)},
)


def defined(logits: list[float], prompt: list[int], completion: list[int], params: SamplingParams) -> list[float]:
    """The adjusted logits, one token at a time."""
    out = list(logits)
    for token in range(len(out)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        for word in params.bad_words_token_ids:
            before = list(word[:-1])
            if word[-1] == token and (completion[-len(before) :] if before else []) == before and len(completion) >= len(before):
                out[token] = -math.inf
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(ENDS))
        if len(completion) < params.min_tokens and token in ends:
            out[token] = -math.inf
        out[token] += max(-100.0, min(100.0, (params.logit_bias or {}).get(token, 0.0)))
        if token in prompt or token in completion:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.frequency_penalty * completion.count(token)
        out[token] -= params.presence_penalty * (token in completion)
    return out


def distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The probabilities that are left after all filters, not normalised."""
    peak = max(logits)
    weights = [math.exp((value - peak) / params.temperature) for value in logits]
    total = sum(weights)
    chances = [weight / total for weight in weights]
    kept = [token for token in range(len(chances)) if chances[token] > 0 and chances[token] >= params.min_p * max(chances)]
    kept.sort(key=lambda token: -chances[token])
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    mass = sum(chances[token] for token in kept)
    nucleus, before = [], 0.0
    for token in kept:
        if nucleus and before >= params.top_p * mass:
            break
        nucleus.append(token)
        before += chances[token]
    return [chances[token] if token in nucleus else 0.0 for token in range(len(chances))]
