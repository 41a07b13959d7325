"""LiteLLM as a client: chat, stream, tool and structured output, printed as JSON."""

import json
import os
from typing import Any

import litellm

MAX_TOKENS = 64
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        # Else arguments need not follow the schema.
        "strict": True,
        "description": "Say what the weather is like in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
BIRD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def ask(question: str, **more: Any) -> Any:
    """LiteLLM's answer, of its own types."""
    return litellm.completion(
        model=f"openai/{os.environ['MODEL']}",
        api_base=f"{os.environ['URL']}/v1",
        api_key="none",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        **more,
    )


def main() -> None:
    """Ask for each."""
    question = "Which bird flies farthest?"
    answer = ask(question)
    chunks = [each.choices[0].delta.content or "" for each in ask(question, stream=True)]
    named = {"type": "function", "function": {"name": "weather"}}
    called = ask("The weather in Oslo?", tools=[TOOL], tool_choice=named)
    schema = {"type": "json_schema", "json_schema": {"name": "bird", "schema": BIRD}}
    bird = ask("Describe a tern.", response_format=schema)
    calls = called.choices[0].message.tool_calls
    found = {
        "answer": answer.choices[0].message.content,
        "streamed": "".join(chunks),
        "num_chunks": len([each for each in chunks if each]),
        "output_tokens": answer.usage.completion_tokens,
        "tool": [each.function.name for each in calls],
        "arguments": [sorted(json.loads(each.function.arguments)) for each in calls],
        "structured": sorted(json.loads(bird.choices[0].message.content)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
