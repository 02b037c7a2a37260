"""Made-up groups of episodes of a tiny model, and learners over it whose updates can be looked
at."""

from dataclasses import replace

import numpy as np
import torch

from tandem import choices
from tandem.config.schema import RL, Config, Rollout, Train
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.rollout.collect import RolloutBatch
from tandem.step import learn_step
from tandem.trainer.batch import Models
from tandem.trainer.learn import LearnStage
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.pack import pack
from tandem.types import Episode, Group, Problem, SamplingParams
from tests.support import dense
from tests.support.tiny import (
    LORA,
    exact_model,
    make_sample,
    random_tokens,
    stock_model,
    tiny_config,
    value_twins,
)

MAX_NEW_TOKENS = 40
SAMPLING = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.7)


class Recorder:
    """Stands for the optimizer: keeps the gradients of each update, changes nothing."""

    def __init__(self, model):
        self.parameters, self.updates = model.trainable(), []

    def update(self, *, skip=False):
        self.updates.append(
            {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        )
        for parameter in self.parameters.values():
            parameter.grad = None
        return {"skipped_updates": float(skip)}


def recorded(model):
    return Learner(model, Recorder(model))


def trained(model, learning_rate=0.01):
    optimizer = Optimizer(model.trainable(), Settings(learning_rate=learning_rate, total_steps=100))
    return Learner(model, optimizer)


def actor_and_critic(critic_rate=0.01):
    critic = trained(value_twins("qwen3")[0], critic_rate)
    return Models(policy=trained(exact_model("qwen3")), critic=critic)


def adapted_model():
    """The weights of tiny.exact_model, with an adapter that changes nothing yet."""
    return make_exact(stock_model(tiny_config("qwen3")), LORA)


def bits(learner):
    """All that an update may change: weights and moments."""
    return {name: w.numpy().tobytes() for name, w in learner.model.named_weights().items()} | {
        name: moment.numpy().tobytes() for name, moment in learner.optimizer.state().items()
    }


def settings(budget=60, **rl):
    return Config(
        rl=RL(**{"prompts_per_step": 3, "group_size": 3, **rl}),
        train=Train(tokens_per_microbatch=budget),
        rollout=Rollout(max_new_tokens=MAX_NEW_TOKENS),
    )


def learn_stage(models, config, *, exact=True, sampling=SAMPLING):
    return LearnStage(
        config=config,
        models=models,
        sampling=sampling,
        parity=choices.engine_of(config).parity(config, exact, models.policy.model.gap),
    )


def learn(models, groups, config, *, version=0, baseline=0.0, exact=True, sampling=SAMPLING):
    """Run learn_step on made-up groups. version: of the weights now.

    The groups count as carried from an earlier step, so they may be of any older weights; the
    config is told how many there are.
    """
    size = {"prompts_per_step": len(groups), "group_size": len(groups[0].episodes)}
    config = config.model_copy(update={"rl": config.rl.model_copy(update=size)})
    batch = RolloutBatch(
        step=version, groups=groups, num_carried=len(groups), baseline=baseline, state={}
    )
    return learn_step(learn_stage(models, config, exact=exact, sampling=sampling), batch)


def sampled_groups(model, *, prompts=3, size=3, turns=1, seed=0, version=0, sampling=SAMPLING):
    """Groups whose engine log-probs are the model's own; between turns stand tokens that nobody
    sampled."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(prompts):
        problem = Problem(
            uid=f"made up/{number}", messages=({"role": "user", "content": "?"},), answer=""
        )
        prompt = random_tokens(rng, int(rng.integers(1, 20)))
        episodes = [
            _episode(rng, model, prompt, problem.uid, place, turns, version, sampling)
            for place in range(size)
        ]
        groups.append(Group(problem=problem, episodes=tuple(episodes)))
    return groups


def _episode(rng, model, prompt, uid, place, turns, version, sampling):
    tokens, mask = [prompt], [np.zeros(len(prompt), bool)]
    for turn in range(turns):
        if turn:
            said = int(rng.integers(1, 5))
            tokens.append(random_tokens(rng, said))
            mask.append(np.zeros(said, bool))
        own = int(rng.integers(1, 12))
        tokens.append(random_tokens(rng, own))
        mask.append(np.ones(own, bool))
    tokens, mask = np.concatenate(tokens), np.concatenate(mask)
    return Episode(
        uid=uid,
        sample_index=place,
        tokens=tokens,
        loss_mask=mask,
        engine_logprobs=own_logprobs(model, tokens, mask, sampling),
        weight_versions=np.where(mask, version, -1).astype(np.int32),
        num_prompt_tokens=len(prompt),
        penalties=np.zeros(len(mask), np.float32),
        messages=({"role": "assistant", "content": ""},) * turns,
        stop_reason="stop",
        reward=float(rng.normal()),
    )


def own_logprobs(model, tokens, mask, sampling):
    """float32 [T]: the model's own at the masked tokens, of the sequence alone; 0 elsewhere."""
    [batch] = pack([make_sample(tokens, mask)], 10_000)
    column = np.zeros(len(tokens), np.float32)
    with torch.no_grad():
        column[mask] = batch_logprobs(model, batch, sampling)[0].numpy()
    return column


def changed(groups, at, **fields):
    """The groups with one episode changed; at: (group, episode)."""
    row, place = at
    episodes = list(groups[row].episodes)
    episodes[place] = replace(episodes[place], **fields)
    return [
        replace(group, episodes=tuple(episodes)) if n == row else group
        for n, group in enumerate(groups)
    ]


def perturbed(groups, size, seed=1, mean=0.0):
    """The groups with engine log-probs off by normal noise."""
    rng = np.random.default_rng(seed)
    for row, group in enumerate(groups):
        for place, episode in enumerate(group.episodes):
            noise = rng.normal(mean, size, len(episode.tokens)).astype(np.float32)
            wrong = np.where(episode.loss_mask, episode.engine_logprobs + noise, np.float32(0))
            groups = changed(groups, (row, place), engine_logprobs=wrong)
    return groups


def episodes_of(groups):
    return [episode for group in groups for episode in group.episodes]


def engine_of(episode):
    return torch.from_numpy(episode.engine_logprobs[episode.loss_mask])


def stock_logprobs(stock, episode):
    return dense.logprobs(stock, episode.tokens, episode.loss_mask, SAMPLING.temperature)


def dense_loss(rl, stock, episodes, advantages, change=lambda part, episode, logprobs: part):
    """The policy loss of the episodes by definition. advantages: a number or a column for each;
    change: of an episode's terms, what else they are made of."""
    terms = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        logprobs = stock_logprobs(stock, episode)
        column = torch.as_tensor(advantage, dtype=logprobs.dtype).expand(len(logprobs))
        part = dense.policy_terms(rl, logprobs, engine_of(episode), column)
        terms.append(change(part, episode, logprobs))
    return dense.aggregate(rl.aggregation, terms, MAX_NEW_TOKENS)


def grpo_of(groups):
    return [
        advantage for group in groups for advantage in dense.group_relative(group.rewards.tolist())
    ]


def learn_once(model, groups, config, *, exact=False, **models):
    """(row, gradients) of one update that changes nothing."""
    policy = recorded(model)
    row = learn(Models(policy=policy, **models), groups, config, exact=exact)
    [gradients] = policy.optimizer.updates
    return row, gradients
