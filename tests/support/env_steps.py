"""Episodes in an environment: of given texts, and of a GRPO step of a tiny random model, for whose
turns stand texts."""

import asyncio

from tandem.envs.calls import environment_loop
from tandem.plugins.agents.env import AgentDrivenEnv
from tandem.rollout.env_pool import EnvPool
from tandem.run_folder.episode_files import read_episodes
from tandem.step import train_step
from tandem.types import SamplingParams, Score
from tests.support.scripted import DigitRenderer, ScriptedReward
from tests.support.stages import config, stages_in, with_runner
from tests.support.waiting import WAIT_S

# half of all tokens end a turn
SHORT = SamplingParams(max_new_tokens=9, stop_token_ids=tuple(range(48, 97)))


class Digits(DigitRenderer):
    """Reads only the digits of a chat."""

    def prompts(self, chats, tools=()):
        return super().prompts([[digits(m["content"]) for m in chat] for chat in chats])


def digits(text):
    return {"content": "".join(letter for letter in text if letter.isdigit())}


class Given(ScriptedReward):
    """The result that the environment gave."""

    def score(self, problem, attempt):
        return Score(reward=attempt.env_rewards.get("env", 0.0), parts={})


def play(env, problem, *texts):
    """Return what reset returns, and step for each text of the model; the environment is closed."""

    async def wait(result):
        return await result if asyncio.iscoroutine(result) else result

    async def episode():
        try:
            async with asyncio.timeout(WAIT_S):
                opening = await wait(env.reset(problem))
                return [opening, *[await wait(env.step(text)) for text in texts]]
        finally:
            await wait(env.close())

    return asyncio.run_coroutine_threadsafe(episode(), environment_loop()).result()


def step_in(folder, make, say, problems):
    """Train one step exactly, and return its episodes; say: the sum of a turn's
    tokens -> its text."""
    settings = config(env__timeout_s=WAIT_S, env__max_turns=3)
    shared = {"sampling": SHORT, "problems": problems, "reward": Given()}
    stages = stages_in(folder, settings, decode=lambda tokens: say(int(sum(tokens))), **shared)
    envs = EnvPool(make=make, limits=settings.env)
    episodes = exact_step(with_runner(stages, envs=envs, renderer=Digits()), folder)
    assert {episode.env_error for episode in episodes} == {""}
    return episodes


def step_with_agent(folder, run, sampling, decode=str):
    """Train one step exactly with an agent's function, and return its episodes."""
    settings = config(env__name="agent", env__timeout_s=WAIT_S)
    stages = stages_in(folder, settings, reward=Given(), sampling=sampling, decode=decode)
    envs = EnvPool(make=lambda: AgentDrivenEnv(run), limits=settings.env)
    return exact_step(with_runner(stages, envs=envs), folder)


def exact_step(stages, folder):
    metrics = train_step(stages, 0).metrics
    assert (metrics["logprob_gap"], metrics["ratio"]) == (0.0, 1.0) and metrics["grad_norm"] > 0
    return read_episodes(next(folder.glob("*.parquet")))
