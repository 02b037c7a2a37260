"""Files of the images of a run, each under the name that its tokens have: in the run folder, or of
a command without one in the user's cache.

    RUN/images/3fa9c1d20b7

Every process on this machine that the command starts finds them: the folder is in its environment.
Knows no pixels.
"""

import os
import threading
from pathlib import Path

from tandem.runtime.disk import DISK, disk_errors, make_folder, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import VARIABLE
from tandem.runtime.image_tokens import name_of

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")  # that are read; PIL runs programs for others


def image_folder() -> Path:
    """Return the folder of images."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(cache) / "tandem" / "images")


def put(data: bytes) -> str:
    """Keep an image's file; return its name. Raises UserError for two images of one name."""
    name = name_of(data)
    file = image_folder() / name
    if not file.exists():
        # by a name of its own: other threads and processes may put the same image
        own = file.with_name(f".{name}-{os.getpid()}-{threading.get_ident()}")
        with disk_errors(file):
            make_folder(file.parent)
            write_atomic(own, data)
            DISK.rename(own, file)
    elif file.read_bytes() != data:
        raise UserError(
            "two images have one name, or the file of one has changed",
            where=str(file),
            expected="the image that was kept there",
            next=f"rm {file}, and start again",
        )
    return name


def get(name: str) -> bytes:
    """Read an image's file. Raises UserError if it is not there, or has changed."""
    file = image_folder() / name
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _lost(file, error.strerror or str(error)) from None
    if name_of(data) != name:
        raise _lost(file, f"another file, {name_of(data)}")
    return data


def _lost(file: Path, found: str) -> UserError:
    return UserError(
        "an image of the data is not in the run's folder",
        where=str(file),
        found=found,
        next="restore it from a copy, or read the data again with --fresh",
    )
