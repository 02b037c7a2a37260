"""Episodes of scripted turns: an engine, an environment, and a rollout of both."""

from tandem.config.schema import Env as EnvConfig
from tandem.envs.calls import Caller
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episodes import run_episodes
from tandem.types import Env, Observation, SamplingParams
from tests.support import scripted
from tests.support.scripted import DigitRenderer, ScriptedEngine, said

PROBLEMS = scripted.PROBLEMS[:4]
PARAMS = SamplingParams(max_new_tokens=5, stop_token_ids=(91,))


def user(text):
    return ({"role": "user", "content": text},)


def play(
    make,
    engine,
    *,
    problems=PROBLEMS[:1],
    group_size=1,
    sampling=PARAMS,
    place=("test",),
    on_end=None,
    token_budget=0,
    caller=Caller,
    **limits,
):
    return run_episodes(
        new_groups(problems, group_size, place),
        engine=engine,
        renderer=DigitRenderer(),
        envs=EnvPool(make=make, limits=EnvConfig(**limits), caller=caller),
        sampling=sampling,
        on_end=on_end,
        token_budget=token_budget,
    )


class TurnEngine(ScriptedEngine):
    """Says [7, 91] in every turn; "text" is how many tokens it has read. `stop_reason` other
    than "stop" says [7]."""

    def __init__(self, stop_reason="stop"):
        super().__init__()
        self.stop_reason = stop_reason

    def generate(self, requests):
        tokens = [7, 91] if self.stop_reason == "stop" else [7]
        how = {"logprob": -0.25, "version": 4}
        return [said(tokens, f"{len(r.prompt)}", self.stop_reason, **how) for r in requests]


class Counting(Env):
    """Answers "1", "2", ... and ends at `turns` with reward 1, after a penalty of 0.5 in its second
    turn."""

    def __init__(self, turns=3):
        self.turns, self.heard = turns, []

    async def step(self, text):
        self.heard.append(text)
        if len(self.heard) == self.turns:
            return Observation(done=True, reward=1.0, parts={"turns": self.turns})
        return Observation(
            messages=user(str(len(self.heard))), reward=0.25, penalty=0.5 * (len(self.heard) == 2)
        )
