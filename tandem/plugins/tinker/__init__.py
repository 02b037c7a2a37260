"""Tinker's API over the exact engine, for `tandem serve MODEL --train`.

For whom writes the loop with the `tinker` SDK, or runs tinker-cookbook, on machines of their own.
The log-probs that a client samples are, to the last bit, those that it trains on.

    server.py   the SDK's requests, and futures that are asked for again
    models.py   adapters and whole models, a Session each; their checkpoints and samplers
    losses.py   cross_entropy, importance_sampling, ppo, cispo, gspo and dro
    wire.py     arrays in the SDK's protobuf

It plugs in as training_servers of tandem/registry.py. Extra: `tinker`.
"""
