"""`tandem tiny`: a tiny random model, whose tokens are characters; `tandem sft` and `tandem train`
take it at once.

    tandem tiny models/mine --from problems.jsonl --from chats.jsonl

It does not know the model's architecture: that is model/tiny.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem.cli.progress import print_lines
from tandem.registry import find
from tandem.runtime.disk import DISK, disk_errors
from tandem.runtime.errors import UserError


def tiny(folder: Path, *, sources: Sequence[str], vocab: str, images: bool, **sizes: int) -> None:
    """Write a model with the characters of data sets and of vocab, or printable ASCII if neither is
    given; images: one that reads images; sizes as make_tiny's."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "there is something at the model's place",
            where=str(folder),
            found="a folder that is not empty" if folder.is_dir() else "a file",
            expected="a new folder",
            next="name another",
        )
    from tandem.model.tiny import CHARACTERS

    characters = characters_of(sources, vocab) or CHARACTERS
    unfinished = folder.with_name(f".tmp-{folder.name}")
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():  # of a killed start
            DISK.remove(unfinished)
        make = find("tiny_models", "images" if images else "text", key="--images")
        parameters = make(unfinished, characters=characters, **sizes)
        DISK.rename(unfinished, folder)
    size = f"{parameters:,} random parameters over {len(characters)} characters"
    next_command = f"tandem sft RECIPE model.path={folder} sft.train=CHATS"
    kind = "Qwen2.5-VL" if images else "Qwen3"
    print_lines([f"a {kind} of {size} -> {folder}", f"next: {next_command}"])


def characters_of(sources: Sequence[str], vocab: str) -> list[str]:
    """Collect every character of vocab and of the values in the rows of data sets, in order."""
    from tandem.data.readers import read_rows

    characters = set(vocab)
    for source in sources:
        for row_characters in read_rows(
            source, lambda row: set().union(*_texts(row.values)), key="--from"
        ):
            characters |= row_characters
    return sorted(characters)


def _texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for child in value.values():
                yield from _texts(child)
        case list() | tuple():
            for child in value:
                yield from _texts(child)
        case None | bool():
            pass
        case _:
            yield str(value)
