"""Servers of OpenAI's API sample the episodes, where the engine is their addresses,
"http://HOST:PORT/v1" each.

For anyone who has models served elsewhere: `tandem serve` on other machines, also for training, or
any server of token ids and log-probs for commands that only generate. docs/guide/serving.md has the
recipes.

    backend.py    what the run asks: conflicts, parity, how servers are opened
    rollouts.py   opens them, and gives them each version of the weights as a file
    engines.py    several servers as one engine: who gets which request, who is lost and back
    api.py        a request as JSON, and a completion out of an answer

It plugs in as `engines: http` of tandem/registry.py.
"""
