"""LangChain's client of OpenAI's API: chat, stream, tool and structured output, printed as JSON."""

import json
import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MAX_TOKENS = 64


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Say what the weather is like in a city."""
    return city


class Bird(BaseModel):
    """A bird."""

    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=9)


def main() -> None:
    """Ask for each."""
    model = ChatOpenAI(
        base_url=f"{os.environ['URL']}/v1",
        api_key="none",
        model=os.environ["MODEL"],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    question = "Which bird flies farthest?"
    answer = model.invoke(question)
    chunks = [each.content for each in model.stream(question)]
    named = {"type": "function", "function": {"name": "weather"}}
    # Only a strict tool's arguments are held to its schema.
    bound = model.bind_tools([weather], tool_choice=named, strict=True)
    called = bound.invoke("The weather in Oslo?")
    bird = model.with_structured_output(Bird, method="json_schema").invoke("Describe a tern.")
    found = {
        "answer": answer.content,
        "streamed": "".join(chunks),
        "num_chunks": len([each for each in chunks if each]),
        "output_tokens": answer.usage_metadata["output_tokens"],
        "tool": [each["name"] for each in called.tool_calls],
        "arguments": [sorted(each["args"]) for each in called.tool_calls],
        "structured": sorted(bird.model_dump()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
