"""The one typed tree: every field with its help, its default written once, checked once, frozen afterwards.

A recipe is a short TOML file over these defaults; `key=value` arguments override it. All mistakes are reported
together, each with its key and file. This module imports neither torch nor any stage.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(Section):
    """Where a run lives and how long it is."""

    folder: str = Field("", description="run folder; empty: runs/<recipe name>-<command>")
    seed: int = Field(0, ge=0, description="every random draw of the run is addressed from it")
    steps: int = Field(100, ge=1, description="optimization steps of `tandem train`")
    save_every: int = Field(10, ge=1, description="steps between checkpoints; the last step is always saved")
    keep_checkpoints: int = Field(2, ge=2, description="newest checkpoints kept")
    threads: int = Field(0, ge=0, description="torch threads; 0: one for each core")


class Model(Section):
    """The policy: a Hugging Face model directory or hub name."""

    path: str = Field(
        "", description="Hugging Face directory or hub name of a causal language model with its tokenizer"
    )
    reference: str = Field("", description="frozen reference model for the KL term; empty: the starting weights")


class Data(Section):
    """Problems to train on."""

    train: str = Field("", description="problems, JSONL or Parquet; columns as in docs/data.md or verl's row schema")
    prompt_column: str = Field("prompt", description="column with the messages, or with the user's text")
    answer_column: str = Field(
        "answer", description="column with the answer; verl's reward_model.ground_truth is found by itself"
    )
    category_column: str = Field("data_source", description="column that evaluation is split by")
    system: str = Field("", description="system message put before every problem (not SFT chat) that has none")
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt accepted")
    long_prompts: Literal["error", "drop"] = Field("error", description="what happens to a longer one")
    shuffle: bool = Field(True, description="a new addressed shuffle each epoch")


class Rollout(Section):
    """How episodes are sampled while training."""

    max_new_tokens: int = Field(64, ge=1, description="longest completion, in tokens")
    temperature: float = Field(
        1.0, gt=0, description="sampling temperature; log-probs are of the tempered distribution"
    )
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens of this total probability")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="keep tokens of at least this share of the likeliest one's probability"
    )
    repetition_penalty: float = Field(1.0, gt=0, description="weakens tokens seen before; 1: off")
    stop: list[str] = Field(
        [], description="stop strings in the decoded text (no special tokens), besides the end of turn"
    )
    cache_mb: int = Field(1024, ge=1, description="budget of the key/value cache, MiB")
    max_batch: int = Field(256, ge=1, description="most sequences decoded together")


class Reward(Section):
    """How an episode is scored, in killable worker processes."""

    function: str = Field("answer", description="`answer`, or your own as `module:function` or `file.py:function`")
    timeout_s: float = Field(5.0, gt=0, description="wall clock for one episode; after it the worker is killed")
    workers: int = Field(1, ge=1, description="worker processes")
    overlong_penalty: float = Field(0.0, ge=0, description="subtracted when a completion was cut by max_new_tokens")


class RL(Section):
    """The algorithm."""

    prompts_per_step: int = Field(32, ge=1, description="problems of a step")
    group_size: int = Field(8, ge=1, description="episodes of a problem")
    advantage: Literal["grpo", "grpo_no_std", "dr_grpo", "rloo"] = Field(
        "grpo", description="how rewards become advantages"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="PPO clip: ratios below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="PPO clip: ratios above 1 + clip_high")
    minibatches: int = Field(1, ge=1, description="optimizer updates a step makes over its episodes")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL to the reference in the loss; 0: no reference is loaded"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of that KL")
    importance_cap: float = Field(
        0.0,
        ge=0,
        description="truncated importance sampling: cap of policy/engine probability; 0: off, as P1 makes it 1",
    )


class Train(Section):
    """The optimizer."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")
    tokens_per_microbatch: int = Field(8192, ge=16, description="token budget of one forward and backward pass")


class SFT(Section):
    """`tandem sft`: supervised warm start on the same trainer."""

    train: str = Field("", description="chats, JSONL or Parquet, with `messages`, or with `prompt` and `response`")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="chats of a step")
    learning_rate: float = Field(1e-4, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")


class Eval(Section):
    """Held-out evaluation."""

    data: str = Field("", description="problems, as data.train")
    every: int = Field(
        0, ge=0, description="steps between evaluations of `train`; 0: only before and after, as `sft` does"
    )
    samples: int = Field(4, ge=1, description="sampled episodes of each problem")
    greedy: bool = Field(True, description="also one greedy episode of each problem")


class Config(Section):
    """Everything a run is a function of, besides its data."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    rl: RL = RL()
    train: Train = Train()
    sft: SFT = SFT()
    eval: Eval = Eval()

    @model_validator(mode="after")
    def _cross_checks(self) -> "Config":
        problems = []
        if "" in self.rollout.stop:
            problems.append("rollout.stop: an empty string would end every completion at once")
        if self.rl.group_size < 2:
            problems.append(
                f"rl.group_size: {self.rl.advantage} compares the episodes of a group, so it needs at least 2"
            )
        if self.rl.prompts_per_step % self.rl.minibatches:
            problems.append("rl.minibatches: must divide rl.prompts_per_step, so that groups stay whole")
        if self.model.reference and not self.rl.kl_coef:
            problems.append("model.reference: is set but rl.kl_coef is 0, so it would never be used")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(recipe: str | Path, overrides: list[str]) -> Config:
    """Read a TOML recipe, apply `key=value` overrides, validate. Raises UserError naming every mistake."""
    path = Path(recipe)
    if not path.is_file():
        raise UserError("the recipe does not exist", where=str(path), expected="a TOML file", next="ls recipes/")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            "the recipe is not valid TOML", where=str(path), found=str(error), expected="TOML, see recipes/demo.toml"
        ) from None
    origin: dict[str, str] = {}
    for text in overrides:
        _apply(tree, text, origin)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, str(path), origin) from None


def _apply(tree: dict[str, Any], text: str, origin: dict[str, str]) -> None:
    """Put one `section.field=value` into the tree; the value is TOML, and a bare word is a string."""
    key, sign, raw = text.partition("=")
    section, _, field = key.partition(".")
    if not (sign and section and field):
        raise UserError(
            "an override cannot be read",
            where="command line",
            found=text,
            expected="section.field=value, e.g. rl.group_size=8",
        )
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if not isinstance(tree.setdefault(section, {}), dict):
        raise UserError(
            "the recipe has a value where a section belongs",
            where=section,
            found=repr(tree[section]),
            expected=f"[{section}]",
        )
    tree[section][field] = value
    origin[f"{section}.{field}"] = "command line"


def _section(name: str) -> type[Section]:
    return Config.model_fields[name].annotation  # type: ignore[return-value]


def _explain(error: ValidationError, path: str, origin: dict[str, str]) -> UserError:
    lines = []
    for mistake in error.errors():
        key = ".".join(str(part) for part in mistake["loc"])
        where = origin.get(key, path)
        if mistake["type"] == "extra_forbidden":
            lines.append(f"{key} ({where}): unknown key{_nearest(key)}")
        elif not key:
            lines += [f"{line} ({path})" for line in mistake["msg"].removeprefix("Value error, ").splitlines()]
        else:
            lines.append(
                f"{key} ({where}): found {mistake['input']!r}, {mistake['msg'][0].lower()}{mistake['msg'][1:]}"
            )
    return UserError(
        f"the configuration has {len(lines)} mistake{'s' * (len(lines) > 1)}\n"
        + "\n".join(f"  - {line}" for line in lines),
        next="tandem plan --keys lists every key",
    )


def _nearest(key: str) -> str:
    section, _, field = key.partition(".")
    known = [f"{s}.{f}" for s in Config.model_fields for f in _section(s).model_fields]
    if not field:
        close = difflib.get_close_matches(section, Config.model_fields, 1, 0.5)
        close = close or [k for k in known if k.endswith("." + section)][:1]
    else:
        close = [k for k in known if k.endswith("." + field)][:1] or difflib.get_close_matches(key, known, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else f"; sections are {', '.join(Config.model_fields)}"


def to_toml(config: Config) -> str:
    """The resolved tree, every leaf, as TOML that load_config reads back to an equal Config."""
    lines = []
    for section, fields in config.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in fields.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(_escape(c) for c in value) + '"'
        case list():
            return "[" + ", ".join(_toml_value(v) for v in value) + "]"
        case _:
            return repr(value)


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def describe() -> list[tuple[str, str, str]]:
    """(key, default, help) of every leaf, in order."""
    return [
        (f"{section}.{name}", _toml_value(field.get_default()), field.description or "")
        for section in Config.model_fields
        for name, field in _section(section).model_fields.items()
    ]
