"""A tool task: buy things with the right money. Prices and list are the problem's metadata."""

from dataclasses import replace

from tandem.envs.tools import ToolEnv


class Shop(ToolEnv):  # env = "examples/environments/shop.py:Shop", reward = "env"
    def __init__(self):
        super().__init__(tools=["calculator", self.price, self.pay])
        self.paid = 0.0

    def price(self, item: str) -> float:
        """The price of a thing.

        Args:
            item: Its name.
        """
        return self.prices[item]  # what is not sold is a KeyError, and the model is told

    def pay(self, amount: float) -> None:
        """Pays, once and for all.

        Args:
            amount: The money.
        """
        self.paid = amount

    async def reset(self, problem):
        self.prices, wanted = problem.metadata["prices"], problem.metadata["wanted"]
        self.due = sum(self.prices[item] for item in wanted)
        return [*problem.messages, {"role": "user", "content": "Buy " + ", ".join(wanted)}]

    async def step(self, text):
        answer = await super().step(text)
        return replace(
            answer, done=answer.done or self.paid > 0, reward=float(self.paid == self.due)
        )
