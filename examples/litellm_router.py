"""Two engines behind LiteLLM's Router: a small window first, and a larger one for conversations that do not fit.

python examples/litellm_router.py --model smollm2-135m
"""

import argparse

import litellm

import minivllm_plugin


def main() -> None:
    """Ask a short and a long question under one model name; the Router picks the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name that `minivllm models` lists; its twin is asked too")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()

    minivllm_plugin.register()
    # Engine options belong to the name that LiteLLM calls. `minivllm/<name>` is a second spelling, and so a second engine.
    minivllm_plugin.configure(arguments.model, max_model_len=256, kv_cache_bytes=64 << 20)
    minivllm_plugin.configure(f"minivllm/{arguments.model}", max_model_len=2048, kv_cache_bytes=256 << 20)
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": {"model": f"minivllm/{arguments.model}"}},
            {"model_name": "large", "litellm_params": {"model": f"minivllm/minivllm/{arguments.model}"}},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
    )
    for question in ("What is the capital of France?", "Repeat the last word. " + "France and Italy. " * 100):
        answer = router.completion(
            model="small", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=arguments.max_tokens
        )
        print(f"{answer.usage.prompt_tokens} prompt tokens -> {answer.choices[0].message.content!r}")


if __name__ == "__main__":
    main()
