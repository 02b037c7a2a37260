"""The one typed tree: every field with its help, its default written once, checked once, frozen
afterwards.

A recipe is a short TOML file over these defaults (config/recipe.py reads it). This module imports
neither torch nor any stage.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem.config.checks import contradictions


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(Section):
    """Where a run lives and how long it is."""

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
        description="torch threads of the trainer, kept for the whole run; 0: one a core as it begins. Where they change no "
        "bit, fewer are used beside rollout workers or with fewer cores",
    )
    show_samples: int = Field(
        1, ge=0, description="episodes shown at each evaluation, or ten times without; 0: none"
    )
    stall_s: float = Field(
        300.0,
        gt=0,
        description="seconds without a sign of life after which the run names the culprit and stops",
    )


class Model(Section):
    """The policy: a Hugging Face model directory or hub name."""

    path: str = Field(
        "",
        description="Hugging Face directory or hub name of a causal language model with its tokenizer",
    )
    reference: str = Field(
        "", description="frozen reference of the KL term and of DPO; empty: the starting weights"
    )


class Data(Section):
    """Problems to train on."""

    train: str | list[str] = Field(
        "",
        description="problems (docs/data.md): JSONL, Parquet, CSV, a Hugging Face dataset; or a list of several",
    )
    weights: list[float] = Field(
        [], description="share of each of several sources in the data; empty: all rows of each"
    )
    prompt_column: str = Field(
        "prompt", description="column with the messages, or with the user's text"
    )
    answer_column: str = Field(
        "answer",
        description="column with the answer; verl's reward_model.ground_truth is found by itself",
    )
    category_column: str = Field("data_source", description="column that evaluation is split by")
    system: str = Field(
        "", description="system message put before every problem (not SFT chat) that has none"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt accepted")
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="what happens to a longer one"
    )
    shuffle: bool = Field(True, description="a new addressed shuffle each epoch")


class Rollout(Section):
    """How episodes are sampled while training."""

    max_new_tokens: int = Field(64, ge=1, description="longest completion, in tokens")
    temperature: float = Field(
        1.0, gt=0, description="sampling temperature; log-probs are of what is then sampled"
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
    stop: list[str] = Field(
        [],
        description="stop strings in the decoded text (no special tokens), besides the end of turn",
    )
    cache_mb: int = Field(1024, ge=1, description="budget of the key/value cache, MiB")
    max_batch: int = Field(256, ge=1, description="most sequences decoded together")
    staleness: int = Field(
        0,
        ge=0,
        description="step t is sampled by the weights of step t - staleness, while earlier ones are trained; 0: sync",
    )
    token_budget: int = Field(
        0,
        ge=0,
        description="partial rollouts: tokens after which an episode pauses, to go on in the next step; 0: to its end",
    )
    workers: int = Field(
        0, ge=0, description="rollout processes, one thread each; 0: in the trainer's own process"
    )
    restarts: int = Field(
        10, ge=0, description="rollout processes started anew before the run gives up"
    )


class Env(Section):
    """The world that an episode plays in. `env = "NAME"` is short for `env.name`."""

    name: str = Field(
        "single_turn",
        description="single_turn, tools, python, guess, gymnasium, verifiers or agent; or your own as `file.py:Class`",
    )
    options: dict[str, Any] = Field({}, description="passed to the class, e.g. {limit = 10}")
    max_turns: int = Field(8, ge=1, description="most turns of the model in an episode")
    max_tokens: int = Field(
        0, ge=0, description="longest episode, observations included; 0: what the model can place"
    )
    timeout_s: float = Field(
        60.0, gt=0, description="wall clock that the environment itself may take for one episode"
    )
    concurrency: int = Field(512, ge=1, description="most episodes under way at once")
    on_error: Literal["mask", "zero"] = Field(
        "mask",
        description="an episode whose environment failed or took too long: no loss, or reward 0",
    )
    penalty_mode: Literal["lower", "set"] = Field(
        "lower",
        description="a turn that the environment penalizes: advantage lowered by the penalty, or set to minus it",
    )
    bad_thinking: float = Field(
        0.0, ge=0, description="penalty of a turn with malformed <think> tags; 0: not looked at"
    )


class Sandbox(Section):
    """Where code that a model wrote runs: bubblewrap on this machine, or a server."""

    url: str = Field(
        "", description="a SandboxFusion server, e.g. http://127.0.0.1:8080; empty: bubblewrap here"
    )
    run_untrusted_code_without_isolation: bool = Field(
        False,
        description="run code of the model as a plain process of yours, where there is no sandbox",
    )


class Reward(Section):
    """How an episode is scored, in killable worker processes. `reward = "NAME"` is short for
    `reward.function`."""

    function: str | list[str] = Field(
        "answer",
        description="a built-in (docs/environments.md) or your own as `file.py:function`; or a list of several",
    )
    weights: list[float] = Field(
        [], description="weight of each of several functions; empty: 1 each"
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="keyword arguments by function name, e.g. {numeric = {tolerance = 0.01}}"
    )
    model: str = Field("", description="model of the function `reward_model`, e.g. of `tandem rm`")
    timeout_s: float = Field(
        5.0, gt=0, description="wall clock for one episode; after it the worker is killed"
    )
    workers: int = Field(1, ge=1, description="worker processes")
    overlong_penalty: float = Field(
        0.0, ge=0, description="subtracted when a completion was cut by max_new_tokens"
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


# What an algorithm means, as data: the settings of [rl] that it is made of. `rl.algorithm` fills
# them in where the recipe says nothing, so each stays free to change. Equations, functions and
# papers: docs/algorithms.md.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "sequence_mean"},
    "dr_grpo": {"advantage": "grpo_no_std", "loss": "ppo_clip", "aggregation": "fixed_length"},
    "rloo": {
        "advantage": "rloo",
        "loss": "ppo_clip",
        "aggregation": "fixed_length",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce": {"advantage": "ema", "loss": "reinforce", "aggregation": "fixed_length"},
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "loss": "ppo_clip",
        "aggregation": "token_mean",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "loss": "ppo_clip",
        "aggregation": "token_mean",
        "kl_estimator": "k2",
    },
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "max_gen_batches": 8,
    },
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        "aggregation": "token_mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    "ppo": {
        "advantage": "gae",
        "loss": "ppo_clip",
        "aggregation": "token_mean",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
}


class RL(Section):
    """The algorithm: `algorithm` names a set of the other values, and each of them can be set by
    itself."""

    algorithm: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "dapo",
        "gspo",
        "cispo",
        "ppo",
    ] = Field(
        "grpo", description="fills in what is not set below; docs/algorithms.md has the table"
    )
    prompts_per_step: int = Field(32, ge=1, description="problems of a step")
    group_size: int = Field(8, ge=1, description="episodes of a problem")
    minibatches: int = Field(
        1, ge=1, description="optimizer updates that one pass over a step's episodes makes"
    )
    epochs: int = Field(1, ge=1, description="passes over a step's episodes")
    advantage: Literal[
        "grpo",
        "grpo_no_std",
        "rloo",
        "rloo_std",
        "gdpo",
        "ema",
        "max_at_k",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
    ] = Field("grpo", description="how rewards become advantages")
    k: int = Field(
        4, ge=1, description="max_at_k: the group is rewarded for the best of k episodes (pass@k)"
    )
    ema_decay: float = Field(
        0.9, ge=0, lt=1, description="ema: decay of the running mean reward that is the baseline"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="gae, reinforce_pp: discount a sampled token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="gae: lambda")
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = Field(
        "ppo_clip", description="policy loss"
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = Field(
        "sequence_mean",
        description="how tokens' losses add up: fixed_length divides by episodes x max_new_tokens",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(
        0.2, gt=0, description="ratios above 1 + clip_high are clipped (larger: DAPO's clip-higher)"
    )
    dual_clip: float = Field(
        0.0,
        ge=0,
        description="ppo_clip: largest ratio with a negative advantage (two-sided clip), above 1; 0: off",
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL to the reference; 0: no reference is loaded"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="where that KL goes")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="its estimator")
    correction: Literal[
        "none", "decoupled", "tis", "tis_sequence", "icepop", "mis", "mis_geometric"
    ] = Field(
        "none",
        description="off-policy correction by policy/engine probability; none: P1 makes it 1",
    )
    correction_cap: float = Field(
        2.0,
        gt=0,
        description="largest ratio: tis and tis_sequence truncate to it, the others leave out what is above",
    )
    correction_floor: float = Field(
        0.5, ge=0, lt=1, description="smallest ratio that icepop and mis_geometric accept"
    )
    max_logprob_error: float = Field(
        0.0,
        ge=0,
        description="sequences whose mean exp|policy - engine| is above it carry no loss; 0: off",
    )
    off_policy_mask: float = Field(
        0.0,
        ge=0,
        description="no loss for negative advantages of sequences whose mean log engine/policy is above it; 0: off",
    )
    max_gen_batches: int = Field(
        0,
        ge=0,
        description="dynamic sampling: batches drawn at most to fill a step with groups that have signal; 0: off",
    )
    max_truncated: float = Field(
        1.0, gt=0, le=1, description="share of cut completions above which the run stops; 1: never"
    )
    max_flat_steps: int = Field(
        50,
        ge=0,
        description="steps in a row without any advantage after which the run stops; 0: never",
    )
    mask_truncated: bool = Field(False, description="episodes cut by max_new_tokens carry no loss")
    curriculum: bool = Field(
        False,
        description="draw problems by p (1 - p), p the last mean reward, of 0 to 1; no epochs",
    )

    @model_validator(mode="before")
    @classmethod
    def _algorithm(cls, given: Any) -> Any:
        """The algorithm's values under the given ones; a wrong name is left to the field's own
        check."""
        if not isinstance(given, dict):
            return given
        named = given.get("algorithm", cls.model_fields["algorithm"].default)
        return (
            {**ALGORITHMS[named], **given}
            if isinstance(named, str) and named in ALGORITHMS
            else given
        )


class Critic(Section):
    """The value model of `rl.advantage = "gae"`."""

    path: str = Field(
        "",
        description="model it starts from, e.g. of `tandem rm`; empty: model.path with a new head",
    )
    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate of its own AdamW")
    warmup_steps: int = Field(
        0, ge=0, description="steps that train the critic only, before the policy's first update"
    )
    value_clip: float = Field(
        0.2, ge=0, description="values move at most this far from the rollout's in one step; 0: off"
    )


class Lora(Section):
    """Low-rank adapters in place of full training, for every command that trains."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: all weights are trained")
    alpha: float = Field(16.0, gt=0, description="the adapter counts alpha / rank times")
    targets: list[str] = Field(
        ["all-linear"], description="modules that get one, e.g. q_proj, v_proj"
    )


class Train(Section):
    """The optimizer."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients are scaled down to this global norm"
    )
    tokens_per_microbatch: int = Field(
        8192, ge=16, description="token budget of one forward and backward pass"
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep one activation a layer and compute the rest again: less memory, same bits, more time",
    )
    max_bad_steps: int = Field(
        3, ge=0, description="steps in a row that NaN or infinity may cost before the run stops"
    )


class SFT(Section):
    """`tandem sft`: supervised warm start on the same trainer."""

    train: str = Field(
        "", description="chats, JSONL or Parquet, with `messages`, or with `prompt` and `response`"
    )
    loss_on: Literal["assistant", "all"] = Field(
        "assistant", description="what carries loss: the assistant's turns, or all"
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="chats of a step")
    learning_rate: float = Field(1e-4, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="shape after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")


class Preference(Section):
    """`tandem dpo` and `tandem rm`: learning from pairs of a chosen and a rejected answer."""

    train: str = Field(
        "", description="pairs, JSONL or Parquet, with `prompt`, `chosen` and `rejected`"
    )
    test: str = Field("", description="held-out pairs, for the accuracy before and after")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="pairs of a step")
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="shape after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    loss: Literal["dpo", "ipo"] = Field("dpo", description="dpo: loss of `tandem dpo`")
    beta: float = Field(0.1, gt=0, description="dpo: strength of the KL to the reference")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: share of pairs assumed to be the wrong way round"
    )
    length_normalized: bool = Field(
        False,
        description="dpo: mean log-probs of a token in place of sums; ipo's own default is true",
    )
    nll_coef: float = Field(
        0.0,
        ge=0,
        description="dpo: weight of the chosen answer's mean negative log-likelihood, added to the loss",
    )

    @model_validator(mode="before")
    @classmethod
    def _means_for_ipo(cls, given: Any) -> Any:
        """IPO compares means over tokens, as its authors do, unless the recipe says otherwise."""
        ipo = isinstance(given, dict) and given.get("loss") == "ipo"
        return {"length_normalized": True, **given} if ipo else given


class Distill(Section):
    """`tandem distill`: on-policy distillation from a teacher, over the problems and steps of
    `tandem train`."""

    teacher: str = Field(
        "", description="Hugging Face directory or hub name of a model with the same tokenizer"
    )
    estimator: Literal["exact", "sampled"] = Field(
        "exact",
        description="the divergence over the vocabulary at each sampled position, or reverse KL at the sampled token only",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        "reverse_kl",
        description="exact: KL of student to teacher, of teacher to student, or of both to their mixture",
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="jsd: the teacher's share of the mixture")
    top_k: int = Field(
        0,
        ge=0,
        description="exact: the teacher's k likeliest tokens and all others as one; 0: each token",
    )


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
    success: float = Field(1.0, description="least reward that counts as passed, for pass@k")
    greedy: bool = Field(True, description="also one greedy episode of each problem")


# in a recipe, `env = "guess"` stands for this key of the section
SHORTHANDS = {"env": "name", "reward": "function"}


class Config(Section):
    """Everything a run is a function of, besides its data."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    env: Env = Env()
    sandbox: Sandbox = Sandbox()
    reward: Reward = Reward()
    rl: RL = Field(default_factory=RL)
    critic: Critic = Critic()
    lora: Lora = Lora()
    train: Train = Train()
    sft: SFT = SFT()
    preference: Preference = Preference()
    distill: Distill = Distill()
    eval: Eval = Eval()

    @model_validator(mode="after")
    def _cross_checks(self) -> "Config":
        if mistakes := [reason for wrong, reason in contradictions(self) if wrong]:
            raise ValueError("\n".join(mistakes))
        return self
