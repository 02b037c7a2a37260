"""Words of four letters to sort, and chats of somebody who sorts half of them carelessly, for a
warm start."""

import json
import random
from pathlib import Path


def answer(word):
    return "".join(sorted(word))


def careless(word):  # each half by itself
    return answer(word[:2]) + answer(word[2:])


def write(name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


folder = Path("runs/sorting")
folder.mkdir(parents=True, exist_ok=True)
draw = random.Random(0)
words = list(dict.fromkeys("".join(draw.choices("abcdefgh", k=4)) for _ in range(2500)))
problems = [{"prompt": f"sort {word}", "answer": answer(word)} for word in words[:464]]
write("problems.jsonl", problems[:400])
write("held_out.jsonl", problems[400:])
write(
    "chats.jsonl",
    [
        {"prompt": f"sort {word}", "response": draw.choice([answer, careless])(word)}
        for word in words[464:]
    ],
)
