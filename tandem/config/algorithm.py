"""Sections of the algorithm: how rewards become losses."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem.config.section import OR_FUNCTION, Section, name_of, off_or
from tandem.config.training import LearningRate
from tandem.registry import find, names
from tandem.rl.algorithms import Estimator, PolicyLoss, estimator, policy_loss


def settings_of(name: str) -> dict[str, Any]:
    """Return the values of [rl] that an algorithm stands for; none of a name that is not known."""
    known = name in names("algorithms")
    return dict(find("algorithms", name, key="rl.algorithm").settings) if known else {}


_MEAN = "at least 1, as the mean of exp|difference| is"


class RL(Section):
    """The algorithm: `algorithm` names a set of the other values, and each of them can be set
    alone."""

    algorithm: Annotated[str, name_of("algorithms")] = Field(
        "grpo", description="fills in what is not set below; docs/guide/algorithms.md has the table"
    )
    prompts_per_step: int = Field(32, ge=1, description="problems in a step")
    group_size: int = Field(8, ge=1, description="episodes of each problem")
    minibatches: int = Field(
        1, ge=1, description="optimizer updates in one pass over a step's episodes"
    )
    epochs: int = Field(1, ge=1, description="passes over a step's episodes")
    advantage: Annotated[str, name_of("advantages"), OR_FUNCTION] = Field(
        "grpo", description="how rewards become advantages; or your own, `my.py:NAME`"
    )
    k: int = Field(
        4, ge=1, description="max_at_k: the group is rewarded for the best of k episodes (pass@k)"
    )
    ema_decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="decay of the running mean reward that is the baseline of ema, or of your own",
    )
    gamma: float = Field(
        1.0, gt=0, le=1, description="gae, reinforce_pp: discount per sampled token"
    )
    gae_lambda: float = Field(1.0, ge=0, le=1, description="gae: lambda")
    loss: Annotated[str, name_of("losses"), OR_FUNCTION] = Field(
        "ppo_clip", description="policy loss; or your own, `my.py:NAME`"
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = Field(
        "sequence_mean",
        description="how the losses of tokens are averaged; fixed_length divides by episodes x "
        "max_new_tokens",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(
        0.2, gt=0, description="ratios above 1 + clip_high are clipped (larger: DAPO's clip-higher)"
    )
    dual_clip: Annotated[float, off_or(lambda c: c > 1, "more than 1 (3 in the paper)")] = Field(
        0.0,
        ge=0,
        description="ppo_clip: largest ratio with a negative advantage (two-sided clip), above "
        "1; 0: off",
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL to the reference; 0: no reference is loaded"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the KL is added")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL")
    correction: Literal[
        "none", "decoupled", "tis", "tis_sequence", "icepop", "mis", "mis_geometric"
    ] = Field(
        "none",
        description="off-policy correction by the ratio of policy to engine probability; none: "
        "with exact engines and no staleness the ratio is 1",
    )
    correction_cap: float = Field(
        2.0,
        gt=0,
        description="largest ratio: tis and tis_sequence truncate to it, icepop, mis and "
        "mis_geometric mask what is above",
    )
    correction_floor: float = Field(
        0.5, ge=0, lt=1, description="smallest ratio that icepop and mis_geometric accept"
    )
    max_logprob_error: Annotated[float, off_or(lambda bound: bound >= 1, _MEAN)] = Field(
        0.0,
        ge=0,
        description="sequences with a larger mean exp|policy - engine| log-prob carry no loss; 0: "
        "off",
    )
    off_policy_mask: float = Field(
        0.0,
        ge=0,
        description="sequences with a larger mean log engine/policy ratio carry no loss where "
        "their advantage is negative; 0: off",
    )
    max_gen_batches: int = Field(
        0,
        ge=0,
        description="dynamic sampling: batches sampled at most to fill a step with groups whose "
        "rewards differ; 0: off",
    )
    filter: str = Field(
        "",
        description="your own function, `my.py:NAME`, that tells which groups fill a step of "
        "dynamic sampling; empty: those whose rewards differ",
    )
    max_truncated: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of truncated completions above which the run stops; 1: never",
    )
    max_flat_steps: int = Field(
        50,
        ge=0,
        description="steps in a row without any advantage after which the run stops; 0: never",
    )
    mask_truncated: bool = Field(
        False, description="episodes truncated by max_new_tokens carry no loss"
    )
    router_replay: bool = Field(
        False,
        description="train a mixture of experts with the experts that the engine chose (R3); those "
        "of fresh tokens are checked to be the trainer's own",
    )
    curriculum: bool = Field(
        False,
        description="draw problems with probability p (1 - p), where p is their last mean reward, "
        "from 0 to 1; no epochs",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_algorithm(cls, given: Any) -> Any:
        """Put the values of the algorithm under the given ones. The check of the field reports a
        wrong name."""
        if not isinstance(given, dict):
            return given
        name = given.get("algorithm", cls.model_fields["algorithm"].default)
        return {**settings_of(name), **given} if isinstance(name, str) else given

    def contradictions(self) -> Iterator[str]:
        if self.estimator.compares_group and self.group_size < 2:
            needs = "compares the episodes of a group, so it needs at least 2"
            yield f"rl.group_size: {self.advantage} {needs}"
        teaches = self.estimator.equal_is_zero is False  # a group of equal rewards
        if self.max_gen_batches > 0 and teaches and not self.filter:
            drops = "drops groups of equal rewards, which do have advantages under"
            yield f"rl.max_gen_batches: {drops} rl.advantage={self.advantage}"
        if self.prompts_per_step % self.minibatches:
            yield "rl.minibatches: must divide rl.prompts_per_step, so that groups stay whole"
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            zero = "the gradient of k1 as a loss is zero in expectation"
            yield f"rl.kl_estimator: {zero}; use k2 or k3, or rl.kl_in=reward"
        if self.kl_coef and self.kl_in == "reward" and self.kl_estimator != "k1":
            danger = "in the reward can push the policy away from the reference; use k1"
            yield f"rl.kl_estimator: {self.kl_estimator} {danger}"
        if (
            self.correction in ("icepop", "mis_geometric")
            and self.correction_floor >= self.correction_cap
        ):
            must = "must be below rl.correction_cap, or icepop and mis_geometric accept nothing"
            yield f"rl.correction_floor: {must}"

    @property
    def estimator(self) -> Estimator:
        """The estimator that rl.advantage names."""
        return estimator(self.advantage)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss that rl.loss names."""
        return policy_loss(self.loss)


class Critic(Section):
    """The value model of `rl.advantage = "gae"`, with an AdamW of its own."""

    path: str = Field(
        "",
        description="model it starts from, e.g. of `tandem rm`; empty: model.path with a new head",
    )
    learning_rate: LearningRate = 1e-5
    warmup_steps: int = Field(
        0, ge=0, description="steps that train only the critic, before the policy's first update"
    )
    value_clip: float = Field(
        0.2, ge=0, description="values move at most this far from the rollout's in one step; 0: off"
    )
