"""Programs that play the episode themselves: the environments `agent` and `verifiers`.

For anyone who trains an agent that speaks OpenAI's or Anthropic's API, as it is, or on a published
environment of Prime Intellect's hub: its own program asks, its own tools are served, its own
rewards are the reward. docs/guide/agents.md has both.

    env.py              `agent`: an episode that a program drives through the server
    server.py           a URL for each episode; what is asked there waits for the model's turn
    chat.py             requests of the APIs as turns of a conversation, and back
    verifiers.py        `verifiers`, and the rows of `tandem generate verifiers:ID`
    verifiers_host.py   runs verifiers; imported when such an environment is made

It plugs in as envs and sources of tandem/registry.py. The application and the schema of the APIs
are the core's (serve/). Extra: `verifiers`.
"""
