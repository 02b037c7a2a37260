"""Sections of sampling: model, data, rollouts, environment, rewards, evaluation."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tandem.choices import engine_name
from tandem.config.section import Section, name_of
from tandem.registry import names


class Run(Section):
    """The place of a run and its length."""

    folder: str = Field("", description="run folder; empty: runs/<recipe name>-<command>")
    seed: int = Field(0, ge=0, description="every random draw of the run is addressed from it")
    steps: int = Field(100, ge=1, description="steps of `tandem train` and `tandem distill`")
    save_every: int = Field(
        10, ge=1, description="steps between checkpoints; the last step is always saved"
    )
    keep_checkpoints: int = Field(2, ge=2, description="newest checkpoints kept")
    threads: int = Field(
        0,
        ge=0,
        description="torch threads of the trainer, fixed for the whole run; 0: one per core when "
        "the run starts, shared by the processes of [parallel]. Fewer are used where that changes "
        "no bit: beside rollout workers, or on fewer cores",
    )
    show_samples: int = Field(
        2,
        ge=0,
        description="episodes shown at each evaluation, or ten times in a run without; 0: none",
    )
    trackers: list[Annotated[str, name_of("trackers")]] = Field(
        [],
        description="where metrics and samples go besides the run folder (docs/guide/trackers.md); "
        "each needs the extra of its name; one that fails does not stop the run; wandb, trackio, "
        "mlflow, or of a package with an entry point `tandem.trackers`",
    )
    stall_s: float = Field(
        300.0,
        ge=2,
        le=1e6,
        description="seconds without a sign of life, which come twice a second, after which the "
        "run names the culprit and stops",
    )


def _device(value: str) -> str:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", value):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return value


Device = Annotated[str, AfterValidator(_device)]


def _engine(value: str) -> str:
    known = [name for name in names("engines") if name != "http"]
    are_servers = engine_name(value) == "http" and all(map(_is_server, value.split(",")))
    if not (are_servers or value in known):
        raise ValueError(
            f"expected {', '.join(known)}, or http://HOST:PORT/v1, several with commas"
        )
    return value


def _is_server(url: str) -> bool:
    host = r"\[[0-9a-fA-F:.]+\]|[^][/:@\s]+"
    found = re.fullmatch(f"https?://({host})(:[0-9]{{1,5}})?/v1/?", url.strip())
    return found is not None and int((found[2] or ":0")[1:]) < 1 << 16


class Model(Section):
    """The policy: a Hugging Face model directory or hub name."""

    path: str = Field(
        "",
        description="Hugging Face directory or hub name of a causal language model with its "
        "tokenizer",
    )
    trust_remote_code: bool = Field(
        False,
        description="run the Python files that the model directories of the recipe bring along "
        "(auto_map in config.json), for architectures that transformers lacks",
    )
    reference: str = Field(
        "", description="frozen reference of the KL term and of DPO; empty: the starting weights"
    )
    device: Device = Field(
        "auto",
        description="auto, cpu, cuda or cuda:N; auto: the first GPU if there is one, else the CPU",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="type of the weights that engine and trainer run; bfloat16 is trained on "
        "float32 masters; auto: bfloat16 on a GPU, and in a run on a CPU with AMX or AVX512_BF16 "
        "if it is exact and faster there, else float32",
    )


class Data(Section):
    """Problems to train on."""

    train: str | list[str] = Field(
        "",
        description="problems (docs/guide/data.md): JSONL, Parquet, CSV, a Hugging Face dataset; "
        "or a list of several",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="share of each source in the data; empty: all rows of each"
    )
    prompt_column: str = Field(
        "prompt", description="column with the messages, or with the user's text"
    )
    answer_column: str = Field(
        "answer",
        description="column with the answer; verl's reward_model.ground_truth is found without it",
    )
    category_column: str = Field("data_source", description="column that evaluation is split by")
    system: str = Field(
        "", description="system message put before every problem without one (not before SFT chats)"
    )
    chat_template: str = Field(
        "",
        description="Jinja file with the chat template, for a base model without one, or in the "
        "place of its own; exported models keep it",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt accepted")
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="what happens to a longer prompt"
    )
    shuffle: bool = Field(True, description="shuffle the problems anew in each epoch")

    @property
    def sources(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else self.train

    def contradictions(self) -> Iterator[str]:
        if self.weights and len(self.weights) != len(self.sources):
            count = f"{len(self.weights)} weights for {len(self.sources)} sources"
            yield f"data.weights: {count} in data.train"


class Rollout(Section):
    """Sampling of episodes while training."""

    max_new_tokens: int = Field(64, ge=1, description="longest completion, in tokens")
    temperature: float = Field(
        1.0,
        gt=0,
        description="sampling temperature; log-probs are those of the distribution sampled from",
    )
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(
        1.0, gt=0, le=1, description="keep the likeliest tokens of this total probability"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="keep tokens of at least this share of the likeliest one's probability",
    )
    repetition_penalty: float = Field(1.0, gt=0, description="weakens tokens seen before; 1: off")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="stop strings in the decoded text (no special tokens), besides the end of turn",
    )
    history: Literal["keep", "template"] = Field(
        "keep",
        description="prompt of a later turn: keep: the tokens so far, and the answer behind them; "
        "template: the chat so far as the model's chat template writes it, so that earlier "
        "thoughts go where it drops them; each turn is then a sequence to train",
    )
    cache_mb: int = Field(1024, ge=1, description="size of the key/value cache, MiB")
    release_cache: bool | Literal["auto"] = Field(
        "auto",
        description="the key/value cache gives its memory to the update and takes it again "
        "afterwards; auto: on a GPU. With vLLM only true: it then sleeps in the "
        "update, its weights too",
    )
    max_batch: int = Field(256, ge=1, description="sequences decoded together at most")
    staleness: int = Field(
        0,
        ge=0,
        description="step t is sampled by the weights of step t - staleness, while earlier steps "
        "are trained; 0: synchronous",
    )
    token_budget: int = Field(
        0,
        ge=0,
        description="partial rollouts: tokens after which an episode pauses until the next step; "
        "0: episodes run to their end",
    )
    engine: Annotated[str, AfterValidator(_engine)] = Field(
        "tandem",
        description="tandem: the exact engine; vllm: vLLM in rollout processes; or the address of "
        "an OpenAI-compatible server, several with commas between; or of a package with an entry "
        "point `tandem.engines`",
    )
    workers: int = Field(
        0,
        ge=0,
        description="rollout processes, one thread each, all for one that takes turns with the "
        "trainer; 0: in the trainer's own process",
    )
    vllm: dict[str, Any] = Field(
        {},
        description="vLLM's engine arguments by its own names, e.g. {tensor_parallel_size = 2, "
        'enforce_eager = false, quantization = "fp8"}; not those that other keys decide',
    )
    restarts: int = Field(
        10,
        ge=0,
        description="restarts of rollout processes, or losses of servers, before the run gives up",
    )
    devices: list[Device] = Field(
        [],
        description="devices of the rollout processes, in turn, for each as many as vLLM divides "
        "its model over; empty: the GPUs of the ranks, else that of model.device",
    )

    @property
    def renders(self) -> bool:
        """Tell whether each turn's prompt is rendered by the chat template."""
        return self.history == "template"

    @property
    def tensor_parallel(self) -> int:
        """The processes that divide the model of one rollout worker."""
        return self.vllm.get("tensor_parallel_size", 1)

    @property
    def servers(self) -> list[str]:
        """The addresses, if the engine is servers."""
        return [url.strip() for url in self.engine.split(",")]

    def contradictions(self) -> Iterator[str]:
        gpus, ranks = {device for device in self.devices if device != "cpu"}, self.tensor_parallel
        if type(ranks) is not int or ranks < 1:
            yield "rollout.vllm: tensor_parallel_size is a number of at least 1"
        elif len(gpus) % ranks:
            needs = "each rollout process needs as many GPUs of its own as tensor_parallel_size"
            yield f"rollout.devices: {needs}, {ranks}"


class Env(Section):
    """The environment of an episode. `env = "NAME"` is short for `env.name`."""

    name: str = Field(
        "single_turn",
        description="single_turn, tools, mcp, python, guess, gymnasium, openenv, harbor, verifiers "
        "or agent; or your own as `file.py:Class`",
    )
    options: dict[str, Any] = Field({}, description="passed to the class, e.g. {limit = 10}")
    max_turns: int = Field(8, ge=1, description="turns of the model in an episode at most")
    max_tokens: int = Field(
        0,
        ge=0,
        description="longest episode, observations included; 0: as long as the model allows",
    )
    timeout_s: float = Field(
        60.0, gt=0, description="wall-clock seconds that the environment may take for one episode"
    )
    concurrency: int = Field(512, ge=1, description="episodes of a step in flight at most")
    on_error: Literal["mask", "zero"] = Field(
        "mask",
        description="an episode whose environment failed or took too long: no loss, or reward 0",
    )
    penalty_mode: Literal["lower", "set"] = Field(
        "lower",
        description="a turn that the environment penalizes: its advantage is lowered by the "
        "penalty, or set to minus the penalty",
    )
    bad_thinking: float = Field(
        0.0, ge=0, description="penalty of a turn with malformed <think> tags; 0: not checked"
    )


class Sandbox(Section):
    """The place for code that a model wrote: bubblewrap on this machine, or a server."""

    url: str = Field(
        "", description="a SandboxFusion server, e.g. http://127.0.0.1:8080; empty: bubblewrap here"
    )
    run_untrusted_code_without_isolation: bool = Field(
        False,
        description="run the model's code as a plain process of yours, where there is no sandbox",
    )

    @property
    def kind(self) -> str:
        """Return the sandbox's name in the registry."""
        return "fusion" if self.url else "bubblewrap"


class Reward(Section):
    """The score of an episode, in killable worker processes. `reward = "NAME"` is short for
    `reward.function`."""

    function: str | list[str] = Field(
        "answer",
        description="a built-in (docs/guide/rewards.md) or your own as `file.py:function`; or "
        "a list of several",
    )
    weights: list[float] = Field([], description="weight of each function; empty: 1 each")
    options: dict[str, dict[str, Any]] = Field(
        {}, description="keyword arguments by function name, e.g. {numeric = {tolerance = 0.01}}"
    )
    model: str = Field("", description="model of the function `reward_model`, e.g. of `tandem rm`")
    timeout_s: float = Field(
        5.0,
        gt=0,
        description="wall-clock seconds for one episode, after which the worker is killed",
    )
    workers: int = Field(1, ge=1, description="worker processes")
    overlong_penalty: float = Field(
        0.0, ge=0, description="subtracted when a completion was truncated by max_new_tokens"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="last tokens before that limit over which the penalty grows (DAPO)"
    )

    @property
    def functions(self) -> list[str]:
        return [self.function] if isinstance(self.function, str) else self.function

    @property
    def names(self) -> list[str]:
        """Names of the functions in parts and options: "score" for "my.py:score"."""
        return [function.rpartition(":")[2] for function in self.functions]

    def contradictions(self) -> Iterator[str]:
        functions = self.functions
        if len(set(functions)) != len(functions) or not functions:
            yield "reward.function: names no function, or one of them twice"
        if self.weights and len(self.weights) != len(functions):
            yield f"reward.weights: {len(self.weights)} weights for {len(functions)} functions"
        if ("reward_model" in functions) != bool(self.model):
            yield (
                "reward.model: belongs to the function `reward_model`, and that function needs it"
            )
        if set(self.options) - set(self.names):
            options, names = ", ".join(sorted(self.options)), ", ".join(functions)
            yield f"reward.options: has options for {options}, but reward.function is {names}"


class Eval(Section):
    """Held-out evaluation."""

    data: str = Field("", description="problems, as data.train")
    every: int = Field(
        0,
        ge=0,
        description="steps between evaluations; 0: only before and after, as `sft` always does",
    )
    samples: int = Field(
        4, ge=1, description="sampled episodes of each problem; pass@k is reported for k up to it"
    )
    success: float = Field(1.0, description="smallest reward that counts as passed, for pass@k")
    greedy: bool = Field(True, description="also one greedy episode of each problem")
    metric: str = Field("", description="your own function over the sampled episodes, `my.py:NAME`")
    keep_best: bool = Field(
        False,
        description="keep the checkpoint with the best held-out reward beyond "
        "run.keep_checkpoints (best.json names it); train, distill and dpo",
    )
    patience: int = Field(
        0,
        ge=0,
        description="evaluations in a row without a better held-out reward after which training "
        "stops; 0: never; train, distill and dpo",
    )
