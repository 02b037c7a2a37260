"""Data sets by their name on the Hugging Face hub. The only file that imports `datasets`, an extra.

Knows names, configurations and splits: "openai/gsm8k:main#train". Does not know what a row means.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tandem.data.readers.arrow_rows import BATCH, choose_split, table_rows
from tandem.data.readers.text_rows import Payload
from tandem.runtime.errors import UserError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
CONNECT_S = 3.0  # longest wait for the hub itself; the libraries try for a minute


def is_hub_name(name: str) -> bool:
    """Tell whether a name is OWNER/NAME or OWNER/NAME:CONFIGURATION, without the split."""
    return _NAME.fullmatch(name) is not None


def hub_rows(name: str, split: str, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row, downloaded once and mapped from the cache."""
    table = _load(name, split, key).with_format("arrow")
    return table_rows(table.iter(batch_size=BATCH), f"{key} cannot be read from the hub", name)


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

    _require_connection(name, key, datasets.config.HF_HUB_OFFLINE)
    path, _, configuration = name.partition(":")
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise _unknown(name, key, found) from None
    return splits[choose_split([str(each) for each in splits], split, name, key)]


def _require_connection(name: str, key: str, offline: bool) -> None:
    """Raise UserError at once if the hub cannot be reached: its own client tries for half a minute.
    Behind a proxy only the client can tell."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    behind_proxy = address.scheme in getproxies() and not proxy_bypass(address.hostname or "")
    if offline or behind_proxy:
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise _unknown(name, key, f"{error}, at {constants.ENDPOINT}") from None


def _unknown(name: str, key: str, found: str) -> UserError:
    return UserError(
        f"{key} names no file, and no dataset of the hub that can be had",
        where=f"{key}, {name!r}",
        found=found,
        expected="a file, or a dataset that is on the hub or in its cache (HF_HUB_OFFLINE=1)",
        next=f"ls {Path(name).parent}",
    )
