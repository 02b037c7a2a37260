"""BFCL's single-turn categories in Python, graded by its AST rule (Berkeley Function Calling
Leaderboard): names, arguments and their types. Inside of lists types are not compared.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.data.readers import Placed, RowError, source_rows
from tandem.model.tool_calls import Call, argument_types, read_calls, with_types
from tandem.rewards.builtin import behind_thoughts
from tandem.types import Env, Message, Problem

CATEGORIES = "simple", "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"
ANSWERS = "possible_answer"  # the folder of the answers, beside the questions
NAMES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # in JSON schemas
# of values; others are text
TYPES: dict[str, set[type]] = {"object": {dict}, "number": {float, int}, "array": {list}}
TYPES |= {"integer": {int}, "boolean": {bool}}


class FunctionsEnv(Env):
    """A single turn whose prompt shows the functions of the row, if it has some."""

    async def reset(self, problem: Problem) -> Sequence[Message]:
        self.tools = problem.metadata.get("functions", ())
        return problem.messages


def files(place: str, key: str) -> list[Path]:
    """List the files of a folder of bfcl-eval's data, or of a data set on the hub."""
    if not (folder := Path(place)).is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(place, repo_type="dataset", allow_patterns="*BFCL_v*"))
    return [file for name in CATEGORIES for file in sorted(folder.glob(f"**/BFCL_v?_{name}.json"))]


def rows(place: str, key: str) -> Placed:
    """Yield the questions, with their answers."""
    found = files(place, key)
    answers = {
        payload[0]["id"]: payload[0]
        for file in found
        for _, payload in (source_rows(str(file), key) if file.parent.name == ANSWERS else ())
        if not isinstance(payload, RowError)
    }
    for file in found:
        for where, payload in source_rows(str(file), key) if file.parent.name != ANSWERS else ():
            if not isinstance(payload, RowError):
                payload = answers.get(payload[0].get("id"), {}) | payload[0], ""
            yield f" {file.name}{where}", payload


def columns(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    category, mark = row["id"].rpartition("_")[0], re.compile(rf'"type": "({"|".join(NAMES)})"')
    shown = mark.sub(lambda found: f'"type": "{NAMES[found[1]]}"', json.dumps(row["function"]))
    return {
        "prompt": row["question"][0],
        "answer": "",
        "data_source": f"bfcl_{category}",
        "functions": [{"type": "function", "function": one} for one in json.loads(shown)],
        "calls": [] if category == "irrelevance" else row["ground_truth"],
    }


@behind_thoughts
def right_calls(problem: Problem, completion: str) -> float:
    """Return 1 if the calls are those wanted, in any order; where none is wanted, if none can be
    read."""
    wanted = problem.metadata["calls"]
    tools = {one["function"]["name"]: one for one in problem.metadata["functions"]}
    found = list(read_calls(completion, tools=tools).calls)
    for [(name, answers)] in map(dict.items, wanted):
        about = tools[name]["function"]["parameters"]
        for call in found:
            if isinstance(call, Call) and call.name == name:
                given = with_types(call, argument_types(tools[name])).arguments
                if given.keys() >= set(about["required"]) and is_right(given, answers, about):
                    found.remove(call)
                    break
        else:
            return 0.0
    return float(not found if wanted else not any(isinstance(one, Call) for one in found))


def is_right(given: Any, answers: Any, about: Mapping[str, Any]) -> bool:
    """Tell whether the arguments are right: of the types described, or of the answer's own."""
    known = {name: TYPES.get(one["type"], {str}) for name, one in about["properties"].items()}
    return _fits(given, answers) and all(
        name in known
        and type(value) in (*known[name], *(type(one) for one in answers[name] if one != ""))
        for name, value in given.items()
    )


def _fits(given: Any, answers: Any) -> bool:
    """Tell whether values are each one of its answers; "" is the answer that leaves it out."""
    return given.keys() <= answers.keys() and all(
        any(_same(given[name], one) for one in some) if name in given else "" in some
        for name, some in answers.items()
    )


def _same(value: Any, answer: Any) -> bool:
    match value, answer:
        case dict(), dict():
            return _fits(value, answer)
        case list(), list():
            return len(value) == len(answer) and all(map(_same, value, answer))
        case str(), str():
            return _plain(value) == _plain(answer)
    return bool(value == answer)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
