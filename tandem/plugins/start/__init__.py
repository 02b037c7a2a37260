"""First steps: `tandem demo`, `init`, `tiny` and `doctor`.

For anyone who has no recipe, no model or no trust in the machine yet. README.md has the demo,
docs/guide/tiny.md a walk from a tiny model to a trained one.

    demo.py      data, tiny model, warm start, GRPO, evaluation and export, as in demo.toml
    init.py      a project that runs offline: recipe, data, reward, model
    tiny.py      the arguments of `tandem tiny`; the models are those of the registry's tiny_models
    doctor.py    packages, processor, memory and sandbox of this machine, a line each

It plugs in as commands of tandem/registry.py.
"""
