"""On-policy distillation: `tandem distill`.

For anyone who has a larger model of the same family: the student samples as in `tandem train`, and
the teacher grades every token. docs/guide/algorithms.md has an example, and the estimators.

    inputs.py        what the command reads, and its two models
    update.py        the updates of a step, in place of those of step.py
    divergences.py   reverse and forward KL, Jensen-Shannon, top-k, as pure functions

It plugs in as models and inputs of tandem/registry.py; its job is the core's (jobs/rl.py). The
keys are the core's, in the section [distill].
"""
