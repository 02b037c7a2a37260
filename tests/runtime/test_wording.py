"""Words of lines that people read."""

import pytest

from tandem.runtime.wording import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1200, "1,200 steps")]
)
def test_one_thing_is_written_in_the_singular(number, said):
    assert counted(number, "steps") == said
