"""A GRPO step of a tiny random model in an environment; its turns stand for texts."""

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


def step_in(folder, make, say, problems):
    """Train one step exactly, and return its episodes; say: the sum of a turn's
    tokens -> its text."""
    settings = config(env__timeout_s=WAIT_S, env__max_turns=3)
    shared = {"sampling": SHORT, "problems": problems, "reward": Given()}
    stages = stages_in(folder, settings, decode=lambda tokens: say(int(sum(tokens))), **shared)
    envs = EnvPool(make=make, limits=settings.env)
    stages = with_runner(stages, envs=envs, renderer=Digits())
    metrics = train_step(stages, 0).metrics
    assert metrics["logprob_gap"] == 0.0 and metrics["grad_norm"] > 0
    episodes = read_episodes(next(folder.glob("*.parquet")))
    assert {episode.env_error for episode in episodes} == {""}
    return episodes
