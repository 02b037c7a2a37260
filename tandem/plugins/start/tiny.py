"""`tandem tiny`: a tiny random model, whose tokens are characters or pieces of text; `tandem
sft` and `tandem train` take it at once.

    tandem tiny models/mine --from problems.jsonl --from chats.jsonl

It does not know the model's architecture: that is model/tiny.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
    bpe: Annotated[bool, Option("--bpe", help="learn byte-pair tokens from --from")] = False
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
    """Make a tiny random model, offline, in seconds. It is ready to train."""
    sizes = asdict(options)
    folder, images = sizes.pop("folder"), sizes.pop("images")
    sources, vocab, bpe = sizes.pop("sources") or [], sizes.pop("vocab"), sizes.pop("bpe")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        next = "name another folder"
        raise UserError("there is something at the model's place", where=str(folder), next=next)
    from tandem.model.tiny import CHARACTERS

    texts = texts_of(sources)
    if bpe and not texts:
        raise UserError("--bpe learns from texts", where="--bpe", next="add --from DATA")
    characters = sorted(set(vocab).union(*texts)) or CHARACTERS
    make_model = find("tiny_models", "images" if images else "text", key="--images")
    with whole_folder(folder) as unfinished:
        parameters = make_model(
            unfinished, characters=characters, texts=texts if bpe else [], **sizes
        )
    size = f"{parameters:,} random parameters over {len(characters)} characters"
    next_command = f"tandem sft RECIPE model.path={folder} sft.train=CHATS"
    kind = "Qwen2.5-VL" if images else "Qwen3"
    print_lines([f"a {kind} of {size} -> {folder}", f"next: {next_command}"])


tiny = command_of(Options, make)


def make_algebra_model(chats: Path, folder: Path, seed: int) -> None:
    """Make the algebra data set's model, of 0.4M parameters. BPE saves four tokens of ten."""
    from tandem.model.tiny import make_tiny

    make_tiny(folder, texts=texts_of([str(chats)]), layers=2, intermediate=384, seed=seed)


def texts_of(sources: Sequence[str]) -> list[str]:
    """Return the values in the rows of data sets, as text."""
    from tandem.data.readers import read_rows

    rows = (read_rows(source, lambda row: _texts(row.values), key="--from") for source in sources)
    return [text for row in chain.from_iterable(rows) for text in row]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for child in value for text in _texts(child)]
    return [] if value is None or isinstance(value, bool) else [str(value)]
