"""A finished run asked again: `tandem replay`, `why` and `diff`.

For anyone who doubts a number of a run, or wants to know why an episode got its reward and what the
update made of each of its tokens. It reads the run folder; docs/guide/replay.md has examples.

    cli.py                 the commands; show.py prints what they found
    replay.py              a step learned again, every number compared with the recorded one
    replay_run.py          the run's job, opened again for that
    rescore.py             the step's rewards, computed again
    why.py                 the history of an episode, and of each of its tokens

It plugs in as commands of tandem/registry.py. `tandem diff` compares by the
core's run_folder/diff.py, as `tandem view` does.
"""
