"""The one typed tree: every field with its help, its default written once, checked once, frozen
afterwards.

A recipe is a short TOML file over these defaults (config/recipe.py reads it). The sections stand in
episodes.py, algorithm.py and training.py. Imports neither torch nor any stage.
"""

from collections.abc import Iterator

from pydantic import Field, model_validator

from tandem.config.algorithm import ALGORITHMS, GROUP_RELATIVE, RL, Critic
from tandem.config.episodes import Data, Env, Eval, Model, Reward, Rollout, Run, Sandbox
from tandem.config.section import Section
from tandem.config.training import SFT, Distill, Lora, Preference, Train

__all__ = [
    "ALGORITHMS",
    "GROUP_RELATIVE",
    "RL",
    "SFT",
    "SHORTHANDS",
    "Config",
    "Critic",
    "Data",
    "Distill",
    "Env",
    "Eval",
    "Lora",
    "Model",
    "Preference",
    "Reward",
    "Rollout",
    "Run",
    "Sandbox",
    "Section",
    "Train",
]

# in a recipe, `env = "guess"` stands for this key of the section
SHORTHANDS = {"env": "name", "reward": "function"}


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
        yield from self._schedule_contradictions()
        functions = self.reward.functions
        if self.rl.advantage == "gdpo" and len(functions) < 2:
            yield (
                "rl.advantage: gdpo normalizes each reward function by itself, so reward.function "
                "needs a list of several"
            )
        if self.reward.overlong_buffer >= self.rollout.max_new_tokens:
            yield (
                "reward.overlong_buffer: must be below rollout.max_new_tokens, or every completion "
                "is penalized"
            )
        if "env" in functions and self.env.name == "single_turn":
            yield (
                "reward.function: `env` is what an environment gave, and env.name=single_turn "
                "gives none"
            )
        if self.rl.curriculum and self.data.weights:
            yield (
                "data.weights: a curriculum draws problems by success rate, so shares would have "
                "no effect"
            )
        if self.rl.curriculum and not self.data.shuffle:
            yield "rl.curriculum: draws problems by success rate, which data.shuffle=false forbids"
        if self.rl.advantage == "gae" and self.critic.warmup_steps >= self.run.steps:
            yield "critic.warmup_steps: must be below run.steps, or the policy is never trained"

    def _schedule_contradictions(self) -> Iterator[str]:
        rollout, env = self.rollout, self.env
        if env.name != "single_turn" and self.run.stall_s <= env.timeout_s + 5:
            yield (
                "run.stall_s: must be above env.timeout_s + 5, or a slow environment is taken "
                "for a stall"
            )
        if (rollout.staleness or rollout.token_budget) and self.rl.needs_on_policy:
            yield (
                "rl.loss: reinforce has no probability ratio, and with rollout.staleness or "
                "rollout.token_budget episodes are of older weights; use ppo_clip, or a correction "
                "(rl.correction=tis)"
            )
        if rollout.staleness >= self.run.steps:
            yield (
                "rollout.staleness: must be below run.steps, or the starting weights sample every "
                "step"
            )
        if rollout.token_budget > 0 and env.name in ("agent", "verifiers"):
            yield (
                "rollout.token_budget: an agent's client waits for its answer, so env.name=agent "
                "and verifiers cannot pause"
            )
        if rollout.token_budget >= rollout.max_new_tokens and env.name == "single_turn":
            yield (
                "rollout.token_budget: has no effect from rollout.max_new_tokens on, as no "
                "completion pauses"
            )
