"""Built-in tasks, and `tandem generate`, which writes their problems as JSONL.

For who wants to try a setting before data of his own is there: every row is drawn from its seed,
and no problem is in both splits. docs/guide/data.md lists them, CONTRIBUTING.md how to add one.

    algebra, arithmetic, calculator, countdown, guess, squares   one file each, with a TASK
    reasoning_gym.py   the generators and scorers of the package reasoning-gym, an extra
    generate.py        what the tasks share: addressed draws, splits, no duplicates
    cli.py             `tandem generate`

It plugs in as tasks, commands, rewards (`countdown`, `reasoning_gym`), envs (`guess`) and tools
(`calculator`) of tandem/registry.py.
"""
