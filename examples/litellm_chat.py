"""One chat question to a model inside this process, through LiteLLM, streaming. Run by scripts/demo.

python examples/litellm_chat.py "Why is the sky blue?" --model smollm2-135m
"""

import argparse
import time

import litellm

import minivllm_plugin


def main() -> None:
    """Ask, print the answer as it comes, then what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--model", default="smollm2-135m", help="any name that `minivllm models` lists, or a path")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()

    minivllm_plugin.register()
    print(f"> {arguments.question}", flush=True)
    started = time.perf_counter()
    stream = litellm.completion(
        model=f"minivllm/{arguments.model}",
        messages=[{"role": "user", "content": arguments.question}],
        temperature=0,
        max_tokens=arguments.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    ready = time.perf_counter()
    first: float | None = None
    usage = None
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.perf_counter()
            print(text, end="", flush=True)
        usage = getattr(chunk, "usage", None) or usage
    ended = time.perf_counter()

    print("\n")
    print(f"model ready and request accepted after {ready - started:.1f} s")
    if first is not None and usage is not None:
        speed = (usage.completion_tokens - 1) / max(ended - first, 1e-9)
        print(f"first text {first - ready:.2f} s later, then {speed:.1f} tokens/s")
        print(f"usage: {usage.prompt_tokens} prompt + {usage.completion_tokens} completion = {usage.total_tokens} tokens")


if __name__ == "__main__":
    try:
        main()
    except (litellm.APIError, litellm.BadRequestError, litellm.NotFoundError, litellm.ServiceUnavailableError) as error:
        raise SystemExit(f"{type(error).__name__}: {error.message}") from None
