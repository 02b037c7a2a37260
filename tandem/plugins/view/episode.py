"""One episode and one step, as the run folder has them.

    episodes/<kind>_step_N.parquet --> conversation, tokens, reward parts; the group's attempts
    model/tokenizer.json           --> the text of each token
    why/<key>.json                 --> ratio and advantage of each token, once this was called:
                                       tandem why RUN --episode E --json RUN/why/KEY.json

The journal has rewards but no advantages: that of a group is computed here by the run's own
function where the rewards are all it needs. It does not replay a step: that is `tandem why`.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from string import hexdigits
from typing import Any

import numpy as np

from tandem.model.call_forms import NAMES
from tandem.model.tool_calls import Call, read_calls
from tandem.plugins.view.episodes import EpisodeTable
from tandem.plugins.view.runs import Run, read_json
from tandem.registry import built_in
from tandem.rl.algorithms import estimator
from tandem.run_folder.episode_files import episode_file, read_table
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of, message_text, shows_images
from tandem.runtime.image_tokens import IMAGE, NAME_DIGITS

PEER_TEXT = 4000  # characters of another attempt
OUTCOMES = {
    "train": "trained in this step",
    "carry": "carried to a later step, as this one was full",
    "no_signal": "left out: all its rewards are equal, so they teach nothing",
    "unfinished": "not finished, goes on in a later step",
}
_PEER = ["group", "sample_index", "reward", "stop_reason", "loss_mask", "text", "env_error"]
_LEARNED = ("advantage", "ratio", "clipped", "weight", "masked")


def read_episode(run: Run, kind: str, step: int, row: int) -> dict[str, Any]:
    """Return all that is known of an episode: row `row` of the file of a kind and step. Raises
    KeyError if there is none, UserError if its file is damaged."""
    path = episode_file(run.folder / "episodes", step, kind)
    if not path.is_file():
        raise KeyError(f"{run.name} has no {path.name}")
    table = read_table(path)
    if not 0 <= row < len(table):
        raise KeyError(f"{path.name} has {len(table)} episodes")
    [record] = table.slice(row, 1).to_pylist()
    group = table.column("group").to_numpy() == record["group"]
    peers = table.select(_PEER).filter(group).to_pylist()
    places = np.flatnonzero(group).tolist()
    values = run.config_values()
    own = _step_advantages(run, values, step).get(row) if kind == "train" else None
    return {
        **{name: record[name] for name in _PLAIN},
        "key": str(record["key"]),  # 64 bits, more than a number of a browser
        "kind": kind,
        "row": row,
        "rows": len(table),
        "name": f"{step}:{record['uid']}:{record['sample_index']}",
        "outcome_text": OUTCOMES.get(record["outcome"], "") if kind == "train" else "",
        "conversation": _conversation(record, values),
        "tools": json.loads(record["tools"]),
        "metadata": json.loads(record["metadata"]),
        "reward_parts": dict(record["reward_parts"]),
        "env_rewards": dict(record["env_rewards"]),
        "advantage": own,
        "advantage_kind": values.get("rl.advantage"),
        "peers": [
            {
                "row": place,
                "sample": peer["sample_index"],
                "reward": peer["reward"],
                "stop": peer["stop_reason"],
                "tokens": sum(peer["loss_mask"]),
                "text": peer["text"][:PEER_TEXT],
                "error": peer["env_error"],
            }
            for peer, place in zip(peers, places, strict=True)
        ],
        "tokens": _tokens(run, values, record, own),
    }


_PLAIN = [
    *("step", "group", "outcome", "uid", "sample_index", "category", "answer", "stop_reason"),
    *("env_error", "reward_error", "masked", "reward", "num_turns", "num_prompt_tokens"),
]
# files that a browser shows, by their first bytes
_IMAGES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


def read_image(run: Run, name: str) -> tuple[bytes, str]:
    """Return the file and the media type of an image of a run. Raises KeyError if it has none."""
    known = len(name) == NAME_DIGITS and not set(name) - set(hexdigits)
    path = run.folder / "images" / name
    data = path.read_bytes() if known and path.is_file() else b""
    found = (kind for start, kind in _IMAGES.items() if data.startswith(start))
    if not (kind := "image/webp" if data[8:12] == b"WEBP" else next(found, "")):
        raise KeyError(f"{run.name} has no image {name!r:.40}")
    return data, kind


def _conversation(record: dict[str, Any], values: dict[str, Any]) -> list[dict[str, Any]]:
    """List the messages; those of the model's own attempt are marked as `sampled`. A turn with
    tool calls has them as `calls`, and its other text as `text`; an answer to one has its name as
    `result_of`; one with images has their names as `images`."""
    opening = json.loads(record["opening"]) or json.loads(record["messages"])
    own, tools = json.loads(record["transcript"]), json.loads(record["tools"])
    options = values.get("env.options")
    known = options.get("format") if isinstance(options, dict) else None
    acts = bool(tools) or values.get("env.name", "single_turn") != "single_turn"
    names = [tool["function"]["name"] for tool in tools]
    shown, open_calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for place, message in enumerate([*opening, *own]):
        message = {**message, "sampled": False}
        if shows_images(message):
            message |= {"text": message_text(message), "images": images_of([message])}
        if message.get("role") == "assistant":
            message["sampled"] = place >= len(opening)
            message |= _with_calls(message, known if known in NAMES else "auto", names, acts)
            open_calls = list(message["calls"])
        elif message.get("role") == "tool":
            call = open_calls.pop(0) if open_calls else {}
            message["result_of"] = str(message.get("name") or call.get("name") or "")
        shown.append(message)
    return shown


def _with_calls(
    message: dict[str, Any], written: str, names: Sequence[str], acts: bool
) -> dict[str, Any]:
    """Return the `text` and the `calls` of a turn: the structured ones, else those in its text, if
    the run's environment reads them (acts)."""
    content = message_text(message) if shows_images(message) else message.get("content")
    if message.get("tool_calls"):
        return {"text": content or "", "calls": [one["function"] for one in message["tool_calls"]]}
    if not (acts and isinstance(content, str)):
        return {"text": content, "calls": []}
    reading = read_calls(content, written, names)
    calls = [
        {"name": call.name, "arguments": call.arguments}
        if isinstance(call, Call)
        else {"name": "", "arguments": {}, "bad": call.reason}
        for call in reading.calls
    ]
    whole = all(isinstance(call, Call) for call in reading.calls)  # what cannot be read stays there
    return {"text": reading.before + reading.after if whole else content, "calls": calls}


def _advantages(values: dict[str, Any], peers: Sequence[dict[str, Any]]) -> list[float] | None:
    """Compute the advantages of the attempts of a group from their rewards; None where more than
    they decides."""
    kind = str(values.get("rl.advantage"))
    rewards = [peer["reward"] for peer in peers]
    if values.get("rl.kl_in") == "reward" and values.get("rl.kl_coef"):
        return None
    if kind not in built_in("advantages") or len(rewards) < 2 or any(p["env_error"] for p in peers):
        return None
    part, size = estimator(kind), int(values.get("rl.k", 2))
    if not part.from_group or ("k" in part.settings and not 2 <= size <= len(rewards)):
        return None
    return [float(one) for one in part.bind(rewards=np.array([rewards], float), k=size)()[0]]


def _tokens(
    run: Run, values: dict[str, Any], record: dict[str, Any], advantage: float | None
) -> dict[str, Any]:
    """Return the tokens by column: id, text, sampled, logprob, version, penalty; where it is known,
    the advantage; and, where `tandem why` was asked, what an update made of them."""
    ids, mask = record["tokens"], record["loss_mask"]
    learned = read_json(run.folder / "why" / f"{record['key']}.json").get("tokens", [])
    same = isinstance(learned, list) and len(learned) == len(ids)
    same = same and all(isinstance(row, dict) for row in learned)
    return {
        "id": ids,
        "starts": record.get("starts") or [],
        "text": token_texts(run.folder, str(values.get("model.path", "")), ids),
        "sampled": mask,
        "logprob": record["engine_logprobs"],
        "version": record["weight_versions"],
        "penalty": record["penalties"],
        **({} if advantage is None else {"advantage": [advantage if m else None for m in mask]}),
        **{name: [row.get(name) for row in learned] for name in _LEARNED if same},
    }


def token_texts(folder: Path, model: str, ids: Sequence[int]) -> list[str] | None:
    """Decode each token as inside a text, so that a leading space is kept; None if the run has no
    tokenizer."""
    kept = folder / "model" / "tokenizer.json"
    path = kept if kept.is_file() else Path(model) / "tokenizer.json"
    decoder = _decoder(path, path.stat().st_mtime_ns) if path.is_file() else None
    return (
        None
        if decoder is None
        else ["[image]" if token >= IMAGE else decoder(token) for token in ids]
    )


@lru_cache(maxsize=8)
def _decoder(path: Path, _: int) -> Any:
    """Return a function from a token to its text; None for a file that is no tokenizer."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing narrower
        return None

    @lru_cache(maxsize=1 << 17)
    def text(token: int) -> str:
        once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return str(twice[len(once) :] or once)

    return text


def read_step(run: Run, table: EpisodeTable, step: int) -> dict[str, Any]:
    """Return what a step trained on: its numbers, and its groups with the rewards of each attempt.
    Raises KeyError if the run has no such step."""
    numbers, damaged, versions = run.row(step), "", dict[int, int]()
    try:
        episodes, versions = table.step(step), table.versions(step)
    except UserError as error:  # the numbers are worth a look all the same
        episodes, damaged = [], str(error)
    if not episodes and not numbers and not damaged:
        raise KeyError(f"{run.name} has no step {step}")
    config = run.config_values()
    advantages = {} if damaged else _step_advantages(run, config, step)
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for episode in episodes:
        key = episode["kind"], episode["group"]
        fields = {name: episode[name] for name in _GROUP}
        group = groups.setdefault(key, {**fields, "attempts": []})
        known = advantages.get(episode["row"]) if episode["kind"] == "train" else None
        group["attempts"].append({name: episode[name] for name in _ATTEMPT} | {"advantage": known})
    return {
        "run": run.name,
        "step": step,
        "first": min(run.metrics.steps, default=step),
        "last": max(run.metrics.steps, default=step),
        "numbers": numbers,
        "outcomes": OUTCOMES,
        "groups": list(groups.values()),
        "damaged": damaged,
        "versions": dict(sorted(versions.items())),
        "settings": {name: config[name] for name in _SETTINGS if name in config},
    }


def _step_advantages(run: Run, values: dict[str, Any], step: int) -> dict[int, float]:
    """Return the advantages that the rewards of a group decide, by the row in the step's file."""
    path = episode_file(run.folder / "episodes", step)
    if read_json(run.folder / "run.json").get("command") != "train" or not path.is_file():
        return {}
    table = read_table(path, ["group", "outcome", "reward", "env_error", "penalties"])
    penalized = [bool(one.values.to_numpy().any()) for one in table.column("penalties")]
    members: dict[int, list[dict[str, Any]]] = {}
    for row, record in enumerate(table.drop_columns(["penalties"]).to_pylist()):
        members.setdefault(record["group"], []).append(record | {"row": row})
    found: dict[int, float] = {}
    for peers in members.values():
        if peers[0]["outcome"] != "unfinished" and (own := _advantages(values, peers)):
            found |= {peer["row"]: one for peer, one in zip(peers, own, strict=True)}
    return {row: one for row, one in found.items() if not penalized[row]}


_GROUP = ("kind", "group", "uid", "category", "answer", "prompt", "outcome")
_ATTEMPT = ("row", "sample", "reward", "stop", "tokens", "error", "masked", "snippet")
_SETTINGS = (
    *("rl.algorithm", "rl.advantage", "rl.loss", "rl.aggregation", "rl.correction", "rl.kl_coef"),
    *("rl.kl_in", "rl.entropy_coef", "rollout.history"),
    *("rl.prompts_per_step", "rl.group_size", "rollout.staleness", "train.learning_rate"),
)
