"""An agent of today: a loop around OpenAI's client with one tool. It knows nothing of training."""

import json
import re
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def main() -> None:
    client = OpenAI()  # endpoint and key come from its environment
    messages = [{"role": "user", "content": f"{sys.argv[1]} End with the number alone on the last line."}]
    for _ in range(6):
        said = client.chat.completions.create(model="any", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            sys.stdout.write(f"{said.content}\n")
            return
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)})


def answer(arguments: str) -> str:
    try:
        expression = json.loads(arguments)["expression"]
        if "**" in expression or not re.fullmatch(r"[\d\s.+*/()-]{1,60}", expression):
            raise ValueError("only numbers, + - * / and parentheses")
        return str(eval(expression))
    except Exception as error:
        return f"error: {error}"


if __name__ == "__main__":
    main()
