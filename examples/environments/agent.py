"""An agent: any program that speaks the OpenAI API, here one that answers, and is made to check its
answer."""

import openai


# env.name = "agent", env.options.run = "examples/environments/agent.py:run"
def run(problem, base_url, api_key):
    chat, right = list(problem.messages), []
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=None) as api:
        for question in ("Check that. What is the answer?", ""):
            said = api.chat.completions.create(model="policy", messages=chat).choices[0].message
            chat += [said, {"role": "user", "content": question}]
            right.append(float(problem.answer in said.content))
    return {"reward": right[-1], "parts": {"right_at_once": right[0]}}
