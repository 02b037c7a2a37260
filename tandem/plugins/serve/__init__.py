"""A model directory behind a server for OpenAI's and Anthropic's clients: `tandem serve`.

For anyone who wants to ask a checkpoint, or to sample for another trainer by its exact engine.
docs/guide/serving.md has the routes. Application and schemas are the core's, in tandem/serve/.

    command.py                  the command: its options, the model, the renderer
    endpoints.py                routes: completions, chats, models, weights, metrics
    bodies.py                   what a client may send
    requests.py, responses.py   bodies to the engine's requests, its completions to answers
    texts.py                    the tokenizer and the chat template
    service.py                  one thread runs the engine for all connections
    detokenizer.py              tokens to pieces of text and of tool calls, as they come
    json_masks.py               response_format and forced calls, by llguidance (extra `json`)

It plugs in as a command of tandem/registry.py.
"""
