"""Environments of Prime Intellect's hub, written for verifiers, as Tandem's environment
`verifiers`.

For whom wants to train on a published environment without porting it: its own program asks, its own
tools are served, its own rewards are the reward. env.py has the environment, found by its name in
tandem/registry.py, and the rows of `tandem generate verifiers:ID`; host.py runs verifiers. The
episode is one of envs/agent: verifiers' agent speaks to its server.

    pip install 'tandem-rl[verifiers]'
"""
