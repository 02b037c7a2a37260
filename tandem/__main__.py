"""`python -m tandem` is the `tandem` command."""

from tandem.cli.main import run

run()
