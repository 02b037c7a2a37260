"""Tool calls written as models of each format write them."""

import json

from tandem.model.tool_calls import CLOSE, OPEN, write_calls

STYLES = ("hermes", "qwen3_coder", "llama3", "pythonic", "olmo3", "mistral")


def write_in_style(calls, style):
    match style:
        case "hermes":
            return write_calls(calls)
        case "qwen3_coder":
            return "\n".join(map(_xml, calls))
        case "llama3":
            return "; ".join(_object(call, "parameters") for call in calls)
        case "pythonic":
            return f"[{', '.join(map(_python, calls))}]"
        case "olmo3":
            return f"<function_calls>{chr(10).join(map(_python, calls))}</function_calls>"
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(_object(call, 'arguments') for call in calls)}]"


def _object(call, key):
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _python(call):
    return f"{call.name}({', '.join(f'{name}={v!r}' for name, v in call.arguments.items())})"


def as_texts(call):
    """The arguments as qwen3_coder writes them."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in call.arguments.items()
    }


def _xml(call):
    parameters = "".join(
        f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in as_texts(call).items()
    )
    return f"{OPEN}\n<function={call.name}>\n{parameters}</function>\n{CLOSE}"
