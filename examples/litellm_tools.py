"""A small agent: the model is made to call a tool, the program answers, and a last answer comes as checked JSON.

python examples/litellm_tools.py --model smollm2-135m
"""

import argparse
import json

import litellm
from pydantic import BaseModel

import minivllm_plugin

TEMPERATURES = {"Paris": 18, "Oslo": 4, "Cairo": 33}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature in a city, in degrees Celsius",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": sorted(TEMPERATURES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Advice(BaseModel):
    """What the last answer must look like."""

    city: str
    degrees: int
    take_a_coat: bool


def main() -> None:
    """Two calls: one that must be a tool call, one whose answer has a form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="any name that `minivllm models` lists, or a path")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    minivllm_plugin.register()
    model = f"minivllm/{arguments.model}"

    messages: list[object] = [{"role": "user", "content": "I travel to Oslo. Do I need a coat?"}]
    only = {"type": "function", "function": {"name": "get_temperature"}}
    asked = litellm.completion(
        model=model, messages=messages, tools=[WEATHER], tool_choice=only, temperature=0, max_tokens=arguments.max_tokens
    )
    message = asked.choices[0].message
    [call] = message.tool_calls
    city = json.loads(call.function.arguments)["city"]  # the schema holds: it is one of the three
    print(f"the model calls {call.function.name}(city={city!r})")

    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"{TEMPERATURES[city]} degrees"}]
    advised = litellm.completion(
        model=model, messages=messages, response_format=Advice, temperature=0, max_tokens=arguments.max_tokens
    )
    if advised.choices[0].finish_reason != "stop":
        raise SystemExit("the answer was cut; raise --max-tokens")
    advice = Advice.model_validate_json(advised.choices[0].message.content)
    print(f"and advises: {advice!r}")


if __name__ == "__main__":
    main()
