"""Data sets by their name on the Hugging Face hub. The only file that imports `datasets`, an extra.

Knows names, configurations and splits: "openai/gsm8k:main#train". Does not know what a row means.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.data.readers.arrow_rows import BATCH, choose_split, table_rows
from tandem.data.readers.text_rows import Payload
from tandem.runtime.errors import UserError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def is_hub_name(name: str) -> bool:
    """Tell whether a name is OWNER/NAME or OWNER/NAME:CONFIGURATION, without the split."""
    return _NAME.fullmatch(name) is not None


def hub_rows(name: str, split: str, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row, downloaded once and mapped from the cache."""
    tables = _load(name, split, key).with_format("arrow").iter(batch_size=BATCH)
    batches = (batch for table in tables for batch in table.to_batches())
    return table_rows(batches, f"{key} cannot be read from the hub", name)


def hub_files(name: str, split: str, key: str) -> list[Path]:
    """Return the files of its rows in the cache."""
    return [Path(file["filename"]) for file in _load(name, split, key).cache_files]


def _load(name: str, split: str, key: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"{key} names no file, and a hub name needs the package datasets",
            where=key,
            found=repr(name),
            expected="a file, or the extra",
            next="pip install 'tandem-rl[datasets]'",
        ) from None
    from datasets.exceptions import DatasetsError

    path, _, configuration = name.partition(":")
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key} names no file, and no dataset of the hub that can be had",
            where=f"{key}, {name!r}",
            found=found,
            expected="a file, or a dataset that is on the hub or in its cache (HF_HUB_OFFLINE=1)",
            next=f"ls {Path(name).parent}",
        ) from None
    return splits[choose_split([str(each) for each in splits], split, name, key)]
