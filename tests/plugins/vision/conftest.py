import pytest

from tandem.runtime.image_parts import keep_in


@pytest.fixture(scope="module", autouse=True)
def image_folder(tmp_path_factory):
    keep_in(tmp_path_factory.mktemp("images"))
