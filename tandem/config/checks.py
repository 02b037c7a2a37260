"""Settings that are valid each for itself and make no sense together, as a table of (is it so, why
it cannot be).

config.py asks for it when a recipe is read, so every contradiction is told before anything is
loaded.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.config.schema import RL, Config

GROUP_RELATIVE = ("grpo", "grpo_no_std", "rloo", "rloo_std", "max_at_k", "reinforce_pp_baseline")


def contradictions(config: "Config") -> list[tuple[bool, str]]:
    """(is it so, why it cannot be) of settings that are valid each for itself and make no sense
    together."""
    rl, rollout, preference = config.rl, config.rollout, config.preference
    return [
        *_algorithm_contradictions(rl),
        *_reward_contradictions(config),
        *_schedule_contradictions(config),
        ("" in rollout.stop, "rollout.stop: an empty string would end every completion at once"),
        (
            rl.curriculum and not config.data.shuffle,
            "rl.curriculum: draws problems by success rate, which data.shuffle=false forbids",
        ),
        (
            rl.advantage == "gae" and config.critic.warmup_steps >= config.run.steps,
            "critic.warmup_steps: must be below run.steps, or the policy is never trained",
        ),
        (
            preference.loss == "ipo" and preference.label_smoothing > 0,
            "preference.label_smoothing: is defined for the dpo loss only",
        ),
        (
            config.distill.estimator == "sampled"
            and (config.distill.divergence != "reverse_kl" or config.distill.top_k > 0),
            "distill.estimator: sampled knows the teacher's log-prob of one token, which gives the reverse KL only; use exact",
        ),
    ]


def _algorithm_contradictions(rl: "RL") -> list[tuple[bool, str]]:
    return [
        (
            rl.group_size < 2 and rl.advantage in (*GROUP_RELATIVE, "gdpo"),
            f"rl.group_size: {rl.advantage} compares the episodes of a group, so it needs at least 2",
        ),
        (
            rl.max_gen_batches > 0 and rl.advantage not in GROUP_RELATIVE,
            f"rl.max_gen_batches: drops groups of equal rewards, which do have advantages under rl.advantage={rl.advantage}",
        ),
        (
            rl.max_gen_batches > 0 and rl.loss == "reinforce" and rl.correction == "none",
            "rl.max_gen_batches: survivors are trained a step later, off policy, for which rl.loss=reinforce has no ratio; "
            "use ppo_clip, or a correction",
        ),
        (
            rl.advantage == "max_at_k" and not 2 <= rl.k <= rl.group_size,
            f"rl.k: max_at_k needs 2 <= k <= rl.group_size, found {rl.k} of {rl.group_size}",
        ),
        (
            rl.prompts_per_step % rl.minibatches > 0,
            "rl.minibatches: must divide rl.prompts_per_step, so that groups stay whole",
        ),
        (
            rl.loss == "reinforce" and rl.minibatches * rl.epochs > 1,
            "rl.loss: reinforce has no probability ratio, so a second update on a step's episodes (rl.minibatches, rl.epochs) "
            "would be off policy without a correction; use ppo_clip",
        ),
        (
            rl.dual_clip > 0 and (rl.dual_clip <= 1 or rl.loss != "ppo_clip"),
            "rl.dual_clip: belongs to rl.loss=ppo_clip and is above 1 (3 in the paper), or 0 for off",
        ),
        (
            rl.kl_coef > 0 and rl.kl_in == "loss" and rl.kl_estimator == "k1",
            "rl.kl_estimator: the gradient of k1 as a loss is zero in expectation; use k2 or k3, or rl.kl_in=reward",
        ),
        (
            rl.kl_coef > 0 and rl.kl_in == "reward" and rl.kl_estimator != "k1",
            f"rl.kl_estimator: {rl.kl_estimator} in the reward can push the policy away from the reference; use k1",
        ),
        (
            rl.correction in ("icepop", "mis_geometric")
            and rl.correction_floor >= rl.correction_cap,
            "rl.correction_floor: must be below rl.correction_cap, or icepop and mis_geometric accept nothing",
        ),
        (
            rl.advantage == "gdpo" and rl.kl_coef > 0 and rl.kl_in == "reward",
            "rl.kl_in: gdpo normalizes each reward function by itself, and a KL in the reward is none; use rl.kl_in=loss",
        ),
        (
            0 < rl.max_logprob_error < 1,
            "rl.max_logprob_error: the mean of exp|difference| is at least 1, so a bound below 1 masks every sequence",
        ),
    ]


def _schedule_contradictions(config: "Config") -> list[tuple[bool, str]]:
    rl, rollout, env, stall_s = config.rl, config.rollout, config.env, config.run.stall_s
    return [
        (
            env.name != "single_turn" and stall_s <= env.timeout_s + 5,
            "run.stall_s: must be above env.timeout_s + 5, or a slow environment is taken for a stall",
        ),
        (stall_s < 2, "run.stall_s: must be at least 2: signs of life come twice a second"),
        (
            bool(rollout.staleness or rollout.token_budget)
            and rl.loss == "reinforce"
            and rl.correction == "none",
            "rl.loss: reinforce has no probability ratio, and with rollout.staleness or rollout.token_budget episodes are of "
            "older weights; use ppo_clip, or a correction (rl.correction=tis)",
        ),
        (
            rollout.staleness >= config.run.steps,
            "rollout.staleness: must be below run.steps, or the starting weights sample every step",
        ),
        (
            rollout.token_budget > 0 and env.name in ("agent", "verifiers"),
            "rollout.token_budget: an agent's client waits for its answer, so env.name=agent and verifiers cannot pause",
        ),
        (
            rollout.token_budget >= rollout.max_new_tokens and config.env.name == "single_turn",
            "rollout.token_budget: has no effect from rollout.max_new_tokens on, as no completion pauses",
        ),
    ]


def _reward_contradictions(config: "Config") -> list[tuple[bool, str]]:
    data, env, reward = config.data, config.env, config.reward
    functions, sources = (
        reward.functions,
        [data.train] if isinstance(data.train, str) else data.train,
    )
    return [
        (
            len(set(functions)) != len(functions) or not functions,
            "reward.function: names no function, or one of them twice",
        ),
        (
            bool(reward.weights) and len(reward.weights) != len(functions),
            f"reward.weights: {len(reward.weights)} weights for {len(functions)} functions",
        ),
        (
            config.rl.advantage == "gdpo" and len(functions) < 2,
            "rl.advantage: gdpo normalizes each reward function by itself, so reward.function needs a list of several",
        ),
        (
            reward.overlong_buffer > 0 and not reward.overlong_penalty,
            "reward.overlong_buffer: has no effect without reward.overlong_penalty",
        ),
        (
            reward.overlong_buffer >= config.rollout.max_new_tokens,
            "reward.overlong_buffer: must be below rollout.max_new_tokens, or every completion is penalized",
        ),
        (
            "env" in functions and env.name == "single_turn",
            "reward.function: `env` is what an environment gave, and env.name=single_turn gives none",
        ),
        (
            ("reward_model" in functions) != bool(reward.model),
            "reward.model: belongs to the function `reward_model`, and that function needs it",
        ),
        (
            bool(set(reward.options) - set(reward.names)),
            f"reward.options: has options for {', '.join(sorted(reward.options))}, but reward.function is {', '.join(functions)}",
        ),
        (
            bool(data.weights) and len(data.weights) != len(sources),
            f"data.weights: {len(data.weights)} weights for {len(sources)} sources in data.train",
        ),
        (
            config.rl.curriculum and bool(data.weights),
            "data.weights: a curriculum draws problems by success rate, so shares would have no effect",
        ),
        (
            any(not weight > 0 for weight in data.weights),
            "data.weights: a weight must be above 0; leave the source out instead",
        ),
    ]
