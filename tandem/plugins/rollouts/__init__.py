"""Episodes without training: `tandem rollout` and `tandem try`.

For anyone who generates and scores a data set with a model, keeps the problems that are neither
solved nor hopeless, or tries a reward or an environment on a few rows first.
docs/guide/evaluation.md and docs/guide/rewards.md have examples.

    cli.py       the arguments of the two commands
    rollout.py   every training problem once, in batches; resumes after a kill with the same bits.
                 `--keep LOW:HIGH`: the problems whose mean reward lies in that range
    try_out.py   a few episodes, shown; a model or the user plays

It plugs in as commands of tandem/registry.py. Episodes are played and scored as in training.
"""
