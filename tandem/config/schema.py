"""The one typed tree: every field with its help, its default written once, checked once, frozen
afterwards.

A recipe is a short TOML file over these defaults (config/recipe.py reads it). The sections stand in
episodes.py, algorithm.py and training.py. Imports neither torch nor any stage.
"""

from collections.abc import Iterator

from pydantic import Field, model_validator

from tandem.choices import choices
from tandem.config.algorithm import RL, Critic, settings_of
from tandem.config.cluster import Cluster, Stream, Weights
from tandem.config.episodes import Data, Env, Eval, Model, Reward, Rollout, Run, Sandbox
from tandem.config.parallel import Parallel
from tandem.config.section import Section
from tandem.config.training import SFT, Distill, Lora, Preference, Train
from tandem.registry import names
from tandem.rl.algorithms import OWN, counts_with

# in a recipe, `env = "guess"` stands for this key of the section
SHORTHANDS = {"env": "name", "reward": "function"}

_OF_DPO = ("loss", "beta", "label_smoothing", "length_normalized", "nll_coef")
# the commands that read a section or a key, of those that not every one reads
_READ_BY = {
    "sft": ("sft",),
    "preference": ("dpo", "rm"),
    "distill": ("distill",),
    "critic": ("train",),
    **dict.fromkeys(("rl", "run.steps"), ("train", "distill")),
    **dict.fromkeys((f"preference.{name}" for name in _OF_DPO), ("dpo",)),
}

_WITHIN = ("icepop", "mis_geometric")
# Keys that count only beside another: which, and its values then; (): any but 0, false and "".
# Those of rl.advantage and rl.loss are in rl/algorithms.py.
COUNTS_WITH: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("rl.correction_cap", "rl.correction", ("tis", "tis_sequence", "mis", *_WITHIN)),
    ("rl.correction_floor", "rl.correction", _WITHIN),
    ("rl.filter", "rl.max_gen_batches", ()),
    ("rl.router_replay", "rollout.engine", ("tandem",)),  # which reports the chosen experts
    ("rl.router_replay", "train.backend", ("tandem",)),
    ("rl.curriculum", "data.shuffle", ()),  # draws problems by success rate
    ("train.offload_optimizer", "train.optimizer", tuple(names("offload"))),
    ("eval.keep_best", "eval.data", ()),
    ("eval.keep_best", "eval.every", ()),
    ("eval.patience", "eval.data", ()),
    ("eval.patience", "eval.every", ()),
    ("lora.alpha", "lora.rank", ()),
    ("lora.rank", "train.backend", ("tandem",)),
    ("lora.base", "lora.rank", ()),
    ("train.muon_momentum", "train.optimizer", ("muon",)),
    ("train.router_aux_loss_coef", "train.backend", ("tandem",)),
    ("parallel.shard", "train.backend", ("tandem",)),
    ("preference.label_smoothing", "preference.loss", ("dpo",)),
    ("distill.divergence", "distill.estimator", ("exact",)),
    ("distill.top_k", "distill.estimator", ("exact",)),
    ("distill.jsd_beta", "distill.divergence", ("jsd",)),
    ("reward.overlong_buffer", "reward.overlong_penalty", ()),
    ("eval.metric", "eval.data", ()),
    ("data.weights", "rl.curriculum", ("false",)),
    ("rollout.vllm", "rollout.engine", ("vllm",)),
    ("weights.transport", "rollout.workers", ()),  # else the engine runs the trainer's own tensors
    ("weights.delta", "rollout.workers", ()),
    ("cluster.trainers", "cluster.nodes", ()),
    ("cluster.placement", "cluster.nodes", ()),
    ("cluster.address", "cluster.nodes", ()),
    ("cluster.reward_workers", "cluster.nodes", ()),
    ("cluster.env_workers", "cluster.nodes", ()),
)
_ONE_PROCESS = "a microbatch's tokens and layers must be in one process"
_ONE_SEQUENCE = "it has one sequence of tokens for each episode"
_WAITS = "an agent's client waits for its answer, so its episode cannot pause"
_FREEZES = (
    "adapters freeze the matrices of the layers, which it steps; use adamw, which steps the "
    "adapters' factors"
)
_CUTS_ROWS = (
    "it divides rows of weights, whose blocks share a scale; divide by parallel.data, pipeline or "
    "expert"
)
_WHOLE = "quantized weights are not divided, so [parallel] may have one process; use float"
# Keys that do not go with each other: one and its values, another and its values, and why; (): any
# but the default, and of parallel.mesh any of several processes.
APART: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...], str], ...] = (
    ("train.router_aux_loss_coef", (), "parallel.context", (), _ONE_PROCESS),
    ("train.router_aux_loss_coef", (), "parallel.pipeline", (), _ONE_PROCESS),
    ("rl.router_replay", (), "parallel.context", (), _ONE_PROCESS),
    ("rl.router_replay", (), "parallel.pipeline", (), _ONE_PROCESS),
    ("train.optimizer", ("muon",), "lora.rank", (), _FREEZES),
    ("parallel.tensor", (), "train.optimizer", ("adamw_8bit",), _CUTS_ROWS),
    ("parallel.shard", (), "parallel.expert", (), "then only 0 is possible"),
    ("lora.base", (), "parallel.mesh", (), _WHOLE),
    ("rollout.token_budget", (), "env.name", ("agent", "verifiers"), _WAITS),
    ("rollout.history", (), "rl.router_replay", (), _ONE_SEQUENCE),
    ("rollout.history", (), "stream.kind", ("transfer_queue",), _ONE_SEQUENCE),
)


def is_read(command: str, key: str) -> bool:
    """Tell whether a command, or with "" any, reads section.key."""
    of_section = _READ_BY.get(key.partition(".")[0], (command,))
    return not command or (command in of_section and command in _READ_BY.get(key, of_section))


class Config(Section):
    """All inputs of a run, besides its data."""

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
    parallel: Parallel = Parallel()
    stream: Stream = Stream()
    weights: Weights = Weights()
    cluster: Cluster = Cluster()
    sft: SFT = SFT()
    preference: Preference = Preference()
    distill: Distill = Distill()
    eval: Eval = Eval()

    @model_validator(mode="after")
    def _check_contradictions(self) -> "Config":
        """Raise ValueError with every contradiction, inside of sections and between them."""
        sections: list[Section] = [getattr(self, name) for name in type(self).model_fields]
        if contradictions := [line for part in (*sections, self) for line in part.contradictions()]:
            raise ValueError("\n".join(contradictions))
        return self

    def contradictions(self) -> Iterator[str]:
        yield from self._without_effect()
        yield from self._apart()
        yield from self.rl.estimator.conflicts(self)
        yield from self.rl.policy_loss.conflicts(self)
        for choice in choices(self):
            yield from choice.conflicts(self)
        if self.reward.overlong_buffer >= self.rollout.max_new_tokens:
            must = "must be below rollout.max_new_tokens, or every completion is penalized"
            yield f"reward.overlong_buffer: {must}"
        if "env" in self.reward.functions and self.env.name == "single_turn":
            nothing = "`env` is what an environment gave, and env.name=single_turn gives none"
            yield f"reward.function: {nothing}"
        if self.env.name != "single_turn" and self.run.stall_s <= self.env.timeout_s + 5:
            must = "must be above env.timeout_s + 5, or a slow environment is taken for a stall"
            yield f"run.stall_s: {must}"
        if self.rollout.staleness >= self.run.steps:
            must = "must be below run.steps, or the starting weights sample every step"
            yield f"rollout.staleness: {must}"
        if (
            self.rollout.token_budget >= self.rollout.max_new_tokens
            and self.env.name == "single_turn"
        ):
            none = "has no effect from rollout.max_new_tokens on, as no completion pauses"
            yield f"rollout.token_budget: {none}"

    def _without_effect(self) -> Iterator[str]:
        """Yield the keys of COUNTS_WITH that are set where they do not count."""
        tree, usual_rl = self.model_dump(), settings_of(self.rl.algorithm)
        of_parts = counts_with(self.rl.estimator, self.rl.policy_loss)
        for key, other, kinds in (*of_parts, *COUNTS_WITH):
            (section, name), (place, choice) = key.split("."), other.split(".")
            default = type(getattr(self, section)).model_fields[name].default
            usual = usual_rl.get(name, default) if section == "rl" else default
            chosen = str(tree[place][choice])
            kind = OWN if ":" in chosen else chosen.lower()
            counts = kind in kinds if kinds else kind not in ("0", "0.0", "false", "")
            if tree[section][name] != usual and not counts:
                beside = f"with {other}={kind}, only with {' or '.join(kinds)}"
                yield f"{key}: has no effect {beside if kinds else f'without {other}'}"

    def _apart(self) -> Iterator[str]:
        """Yield the keys of APART that are set beside what they do not go with."""

        def is_set(key: str, values: tuple[str, ...]) -> str:
            section, name = key.split(".")
            value, field = getattr(getattr(self, section), name), fields[section].get(name)
            usual = field.default if field else ""
            return f"{key}={value}" if (value in values if values else value != usual) else ""

        fields = {name: type(section).model_fields for name, section in self}
        for key, values, other, beside, reason in APART:
            if is_set(key, values) and (found := is_set(other, beside)):
                yield f"{key}: does not go with {found}; {reason}"
