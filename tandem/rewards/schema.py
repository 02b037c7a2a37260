"""The reward `json_schema`: a check of the last JSON value of a completion. Needs the extra
`schema`.

Knows one text and one schema.

    python -c "from tandem.rewards.schema import last_json; \
        print(last_json('first {} then ```json\\n[1, 2]\\n```'))"
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tandem.rewards.parts import BadFunction, BadValue, checked_by
from tandem.rewards.thoughts import behind_thoughts
from tandem.types import Problem

JSON_CHARS = 20_000  # of the end of a completion
NOTHING = object()  # no JSON in a text


def check_schema(options: Mapping[str, Any]) -> None:
    """Refuse an invalid schema, and a machine without jsonschema; raises BadFunction."""
    try:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import validator_for
    except ImportError:
        raise BadFunction(
            "json_schema needs the package jsonschema: pip install 'tandem-rl[schema]'"
        ) from None
    schema = options.get("schema", {})
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise BadFunction(f"json_schema: the option is no schema: {error.message}") from None


@checked_by(check_schema)
@behind_thoughts
def json_schema(problem: Problem, completion: str, *, schema: dict[str, Any] = {}) -> float:  # noqa: B006
    """Return 1 if the last JSON value of the completion is valid under the option `schema`, or,
    without one, metadata["schema"]."""
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    wanted = schema or problem.metadata.get("schema")
    if not isinstance(wanted, (dict, bool)):
        raise BadValue(f"json_schema: {problem.uid!r} has no `schema`, and no option has one")
    value = last_json(completion)
    return 0.0 if value is NOTHING else float(validator_for(wanted)(wanted).is_valid(value))


def last_json(text: str) -> Any:
    """Return the whole text as JSON, else the last fenced block of JSON, else the last object or
    list in the text, else NOTHING."""
    text = text[-JSON_CHARS:].strip()
    blocks = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", text, re.DOTALL)
    for candidate in (text, *blocks[:-4:-1]):
        try:
            return json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
    return _last_inside(text)


def _last_inside(text: str) -> Any:
    value, at, decoder = NOTHING, 0, json.JSONDecoder(parse_constant=_refuse)
    for opening in re.finditer(r"[{\[]", text):
        if opening.start() < at:  # inside the one before
            continue
        try:
            value, at = decoder.raw_decode(text, opening.start())
        except ValueError:
            continue
        except RecursionError:  # each of the next thousand would be as deep
            return NOTHING
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
