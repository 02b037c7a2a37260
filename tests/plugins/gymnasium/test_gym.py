"""Environments of the real gymnasium: what the model reads, how it acts, and what it earns."""

import gymnasium
import numpy as np
import pytest

from tandem.plugins.gymnasium import GymEnv
from tandem.runtime.errors import UserError
from tandem.types import Problem

PROBLEM = Problem(
    uid="p",
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "Go."}),
    answer="",
)
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["Left", "down", "right", "up"],
}


def seeded(seed):
    return Problem(uid="p", messages=PROBLEM.messages, answer="", metadata={"seed": seed})


class Echo(gymnasium.Env):
    """Asks for its seed's digit; a right answer is worth 1 and a wrong one -0.5; three answers in
    all."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(5, charset="0123456789")
    metadata = {"render_modes": []}  # noqa: RUF012
    closed: list["Echo"] = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted, self.asked = str(self.np_random.integers(10)), 0
        return f"{self.wanted}", {}

    def step(self, action):
        self.asked += 1
        return f"{self.asked}", 1.0 if action == self.wanted else -0.5, False, self.asked == 3, {}

    def close(self):
        self.closed.append(self)


class Wide(Echo):
    action_space = gymnasium.spaces.Box(0, 1)


gymnasium.register("TandemEcho-v0", Echo, disable_env_checker=True)
gymnasium.register("TandemWide-v0", Wide, disable_env_checker=True)


def test_a_text_environment_adds_up_its_rewards():
    env = GymEnv(id="TandemEcho-v0")
    chat = env.reset(seeded(5))
    wanted = str(np.random.Generator(np.random.PCG64(np.random.SeedSequence(5))).integers(10))
    assert chat == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": f"Go.\n\n{wanted}"},
    )
    answers = [env.step(text) for text in (f" {wanted}\n", "hello!", "x", wanted * 2, wanted)]
    assert [a.reward for a in answers] == [1.0, 0.0, 0.0, -0.5, 1.0] and [
        a.done for a in answers
    ] == [False] * 4 + [True]
    assert [m["content"] for a in answers for m in a.messages] == [
        "1",
        "That is no action. An action is Text(1, 5, charset=0123456789).",
        "That is no action. An action is Text(1, 5, charset=0123456789).",
        "2",
    ]
    assert answers[-1].parts == {"turns": 5.0, "bad_actions": 2.0}
    env.close()
    assert Echo.closed[-1].asked == 3


def test_only_episodes_of_one_problem_begin_alike():
    def begins(problem):
        return GymEnv(id="Taxi-v4").reset(problem)[-1]["content"]

    assert begins(seeded(3)) == begins(seeded(3)) != begins(seeded(4))
    uids = {begins(Problem(uid=f"p{n}", messages=PROBLEM.messages, answer="")) for n in range(6)}
    assert len(uids) > 3 and begins(PROBLEM) == begins(PROBLEM)


def test_frozen_lake_is_a_picture_and_its_moves_have_names():
    env = GymEnv(**LAKE)
    assert env.reset(PROBLEM)[-1]["content"] == "Go.\n\n[red S]FFF\nFHFH\nFFFH\nHFFG"
    [moved] = env.step("I go left or Right").messages
    assert moved["content"] == "  (Right)\nS[red F]FF\nFHFH\nFFFH\nHFFG"
    lost = env.step("DOWN!")
    assert (lost.done, lost.reward, lost.messages) == (True, 0.0, ())


@pytest.mark.parametrize(
    ("text", "action"),
    [("1", 1), ("0, no: 1.", 1), *((none, None) for none in ("-1", "1.5", "2", "10", "x1"))],
)
def test_a_choice_is_the_last_number_that_is_one(text, action):
    env = GymEnv(id="Blackjack-v1", invalid_action_penalty=0.3)
    env.reset(seeded(1))
    answer = env.step(text)
    assert answer.penalty == (0.3 if action is None else 0.0) and answer.parts[
        "bad_actions"
    ] == float(action is None)
    if action is None:
        assert answer.messages[0]["content"] == "That is no action. An action is one of 0, 1."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "Nothing-v0"}, "has no such environment"),
        ({"id": "FrozenLake-v1", "kwargs": {"depth": 3}}, "has no such environment"),
        ({"id": "TandemWide-v0"}, "cannot act"),
        ({"id": "Blackjack-v1", "render": True}, "draws no text"),
        ({"id": "Blackjack-v1", "actions": ["hit"]}, "other names"),
        ({"id": "Blackjack-v1", "actions": ["hit", "HIT"]}, "other names"),
        ({"id": "Blackjack-v1", "invalid_action_penalty": -1.0}, "below 0"),
    ],
)
def test_an_invalid_option_is_a_user_error_before_any_episode(options, words):
    with pytest.raises(UserError, match=words):
        GymEnv(**options)
