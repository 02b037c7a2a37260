"""Guess the number: a game of several turns. The difficulty is how many numbers it can be: 8, 16,
32, ...

    tandem generate guess --difficulty 2 --count 400 --out train.jsonl

A row holds the range and the secret; who answers "higher" and "lower" is an environment. Knows
ranges. Does not know environments, files or models.
"""

from tandem.tasks.generate import Draft, Draw, Row, draw_rows, whole

WIDTHS = {1: 8, 2: 16, 3: 32, 4: 64, 5: 128, 6: 256}


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """count different games, a range and a secret each; no game is on both sides, while ranges are.
    Fewer where there are no more: difficulty 1 has about 580 games for training and 150 for
    testing.

    Example row: {"uid": "guess/1/train/0", "prompt": "Guess my number, 12 to 19. I say higher or
    lower.", "answer": "17", "data_source": "guess_1", "difficulty": 1, "low": 12, "high": 19}
    """
    return draw_rows("guess", _draft, split, count, seed, difficulty, list(WIDTHS))


def _draft(draw: Draw, difficulty: int) -> Draft:
    width = WIDTHS[difficulty]
    low = whole(draw, 1, (99 if width < 99 else 999) - width + 1)
    high = low + width - 1
    secret = whole(draw, low, high)
    game = f"{secret} in {low} to {high}"
    return Draft(
        prompt=f"Guess my number, {low} to {high}. I say higher or lower.",
        answer=str(secret),
        side=game,
        core=game,
        columns={"low": low, "high": high},
    )
