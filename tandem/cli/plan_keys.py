"""`tandem plan --keys`: every configuration key. What `tandem plan RECIPE` says is in plan.py,
which needs torch."""

from rich.table import Table

from tandem.cli.progress import console
from tandem.config.recipe import describe


def show_keys() -> None:
    table = Table("key", "default", "meaning")
    for row in describe():
        table.add_row(*row)
    console.print(table)
