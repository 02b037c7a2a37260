"""Tinker's API over the exact engine, for `tandem serve MODEL --train`.

For anyone who writes the loop with the `tinker` SDK, or runs tinker-cookbook, on machines of their
own. The log-probs that a client samples are, to the last bit, those that it trains on.

    server.py   the SDK's requests, and futures that are asked for again
    models.py   adapters and whole models, a Session each; their checkpoints and samplers
    losses.py   cross_entropy, importance_sampling, ppo, cispo, gspo and dro
    wire.py     arrays in the SDK's protobuf

Each client's model has its own copy of the base weights; adapters are of all linears, alpha 32.
Refused: targets that are not the next token, stable_reinforce, images, dimuon, in-flight samplers.

It plugs in as training_servers of tandem/registry.py. Extra: `tinker`.
"""
