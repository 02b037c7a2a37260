"""Commands beside training: `tandem eval`, `export`, `status` and `show`.

For anyone who evaluates a model without a run, wants a checkpoint for stock transformers and vLLM,
or looks at a run from a terminal. docs/guide/evaluation.md and docs/guide/view.md have examples.

    cli.py      the arguments of the commands
    eval.py     the engine without the trainer, on the held-out problems
    export.py   a checkpoint, or its adapter, as a directory or on the hub
    show.py     the episodes of a step as a page; whether a run goes on, and who does what

It plugs in as commands of tandem/registry.py. A run exports its last step by itself.
"""
