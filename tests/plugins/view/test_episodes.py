"""The table of episodes while its files change."""

import pytest

from tandem.plugins.view.episodes import EpisodeTable, Query
from tests.support.viewing import add_step, group, make_run


class Hasty(EpisodeTable):
    """One where another request refreshes after each look at the table."""

    def __init__(self, folder, change):
        super().__init__(folder)
        self.change = change

    def table(self):
        before = super().table()
        self.change()
        self.refresh()
        super().table()
        return before


@pytest.mark.parametrize("step", [1, 2])
def test_a_page_is_of_one_moment_though_another_request_refreshes(tmp_path, step):
    """A new file of episodes, and one of other rewards, as a resume leaves."""
    run = make_run(tmp_path / "run")
    add_step(run, 1, [group("a", ["x", "y"], [1.0, 0.0])])
    texts = ["x", "y", "z"]
    table = Hasty(
        run / "episodes", lambda: add_step(run, step, [group("b", texts, [0.0, 0.5, 0.5])])
    )
    page = table.page(Query(reward_from=0.1), 0, 50)
    assert (page["count"], page["total"], page["mean"]) == (1, 2, 1.0)
    assert [row["uid"] for row in page["rows"]] == ["a"]
