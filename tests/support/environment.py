"""Environment variables for a while, for the processes that a test starts."""

import os
from contextlib import contextmanager


@contextmanager
def environment(**variables):
    """These variables beside the others."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
