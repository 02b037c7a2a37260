"""Count coloured squares on an image. The difficulty: how many there are at most, and colours.

    tandem generate squares --difficulty 1 --count 400 --out train.jsonl

Images are in the rows, as data: URIs of PNG files of 28 x 28 pixels. A row is a chat of `tandem
sft` too, by its `response`. Knows pictures. Does not know models or rewards (`answer` fits).
"""

import base64
import io

import numpy as np

from tandem.plugins.tasks.generate import Generator, TaskProblem, drawn, randint
from tandem.runtime.errors import not_installed

# difficulty -> (most squares, colours on an image)
LEVELS = {1: (3, 1), 2: (5, 1), 3: (5, 2), 4: (9, 3)}
SIDE, CELLS = 28, 4  # pixels, and places for a square, on each side of an image
ROOM = 2  # pixels that a square may be moved by in its place
COLOURS = {"red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255)}


def _problem(rng: Generator, difficulty: int) -> TaskProblem:
    """Draw an image; columns: {"response": "Answer: 2", "images": ["data:image/png;base64,..."]}"""
    most, colours = LEVELS[difficulty]
    names = sorted(rng.permutation(list(COLOURS))[:colours].tolist())
    number = randint(rng, 1, most)
    places = rng.permutation(CELLS * CELLS)[:number].tolist()
    drawn = [
        (place, randint(rng, 0, ROOM), randint(rng, 0, ROOM), names[randint(rng, 0, colours - 1)])
        for place in sorted(places)
    ]
    asked = names[randint(rng, 0, colours - 1)]
    what = f"{asked} squares" if colours > 1 else "squares"
    answer = sum(name == asked for *_, name in drawn) if colours > 1 else number
    return TaskProblem(
        prompt=f"How many {what}?",
        answer=str(answer),
        dedup_key=f"{drawn} {asked}",
        columns={
            "response": f"Answer: {answer}",
            "images": [f"data:image/png;base64,{_png(drawn)}"],
        },
    )


def _png(squares: list[tuple[int, int, int, str]]) -> str:
    """Draw squares, (place, pixels down, pixels right, colour) each, on white; return the PNG file
    in base64."""
    try:
        from PIL import Image
    except ImportError:
        raise not_installed("pillow", "images", where="tandem generate squares") from None
    pixels, size = np.full((SIDE, SIDE, 3), 255, np.uint8), SIDE // CELLS
    for place, down, right, colour in squares:
        top, left = place // CELLS * size + down, place % CELLS * size + right
        pixels[top : top + size - ROOM, left : left + size - ROOM] = COLOURS[colour]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


TASK = drawn("squares", _problem, LEVELS)
