"""Many questions at once from one event loop: the engine computes them in shared batches. One of them is given up on the way.

python examples/litellm_async.py --model smollm2-135m
"""

import argparse
import asyncio

import litellm

import minivllm_plugin

COUNTRIES = ["France", "Italy", "Japan", "Kenya", "Peru", "Norway", "Egypt", "India"]


async def capital(model: str, country: str, max_tokens: int) -> str:
    """One whole answer."""
    answer = await litellm.acompletion(
        model=model,
        messages=[{"role": "user", "content": f"What is the capital of {country}? One sentence."}],
        temperature=0,
        max_tokens=max_tokens,
        timeout=120,  # seconds for loading, waiting and answering together
    )
    return str(answer.choices[0].message.content)


async def first_words(model: str, max_tokens: int) -> str:
    """A stream whose reader leaves early: the engine stops working on it at once."""
    stream = await litellm.acompletion(
        model=model,
        messages=[{"role": "user", "content": "Tell me a very long story."}],
        max_tokens=max_tokens * 20,
        stream=True,
    )
    words = ""
    async with stream:
        async for chunk in stream:
            words += chunk.choices[0].delta.content or ""
            if len(words) > 20:
                break
    return words


async def run(model: str, max_tokens: int) -> None:
    """Ask everything at the same time."""
    *answers, words = await asyncio.gather(
        *(capital(model, country, max_tokens) for country in COUNTRIES), first_words(model, max_tokens)
    )
    for country, answer in zip(COUNTRIES, answers, strict=True):
        print(f"{country:>8}: {answer}")
    print(f"   story: {words}… (left)")


def main() -> None:
    """Parse, register, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="any name that `minivllm models` lists, or a path")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    minivllm_plugin.register()
    asyncio.run(run(f"minivllm/{arguments.model}", arguments.max_tokens))


if __name__ == "__main__":
    main()
