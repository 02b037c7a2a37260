"""`tandem tiny`: a tiny random model, whose tokens are characters; `tandem sft` and `tandem train`
take it at once.

    tandem tiny models/mine --from problems.jsonl --from chats.jsonl

It does not know the model's architecture: that is model/tiny.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tandem.cli.arguments import argument, command_of, unset
from tandem.cli.progress import print_lines
from tandem.registry import find
from tandem.runtime.disk import whole_folder
from tandem.runtime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    folder: Annotated[Path, argument(help="where the model goes: a new folder")]
    sources: Annotated[
        list[str] | None, unset("--from", help="a data set whose characters it knows; any number")
    ] = None
    vocab: Annotated[
        str, unset(help="characters; default: those of --from, or printable ASCII")
    ] = ""
    hidden: Annotated[int, Option(min=8, help="width of the model")] = 128
    layers: Annotated[int, Option(min=1)] = 3
    heads: Annotated[int, Option(min=1, help="attention heads")] = 4
    kv_heads: Annotated[int, Option(min=1, help="key/value heads")] = 2
    intermediate: Annotated[int, Option(min=1, help="width of the MLP")] = 640
    max_tokens: Annotated[
        int, Option("--context", min=8, help="tokens of the longest sequence")
    ] = 256
    images: Annotated[bool, Option("--images", help="it reads images: a Qwen2.5-VL")] = False
    seed: Annotated[int, Option(min=0, help="the same seed gives the same weights")] = 0


def make(options: Options) -> None:
    """Make a tiny random model of characters, offline, in seconds. It is ready to train."""
    sizes = asdict(options)
    folder, images = sizes.pop("folder"), sizes.pop("images")
    sources, vocab = sizes.pop("sources") or [], sizes.pop("vocab")
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
    make_model = find("tiny_models", "images" if images else "text", key="--images")
    with whole_folder(folder) as unfinished:
        parameters = make_model(unfinished, characters=characters, pad_row=True, **sizes)
    size = f"{parameters:,} random parameters over {len(characters)} characters"
    next_command = f"tandem sft RECIPE model.path={folder} sft.train=CHATS"
    kind = "Qwen2.5-VL" if images else "Qwen3"
    print_lines([f"a {kind} of {size} -> {folder}", f"next: {next_command}"])


tiny = command_of(Options, make)


def characters_of(sources: Sequence[str], vocab: str) -> list[str]:
    """Collect every character of vocab and of the values in the rows of data sets, in order."""
    from tandem.data.readers import read_rows

    characters = set(vocab)
    for source in sources:
        for found in read_rows(source, lambda row: set().union(*_texts(row.values)), key="--from"):
            characters |= found
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
