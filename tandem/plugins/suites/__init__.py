"""Known benchmarks by name, as sources of problems with their own graders: `suite:gsm8k`.

For anyone who compares models. docs/guide/evaluation.md lists rows, prompts and graders.

    suites.py    what a suite is, its rows, and the reward `suite`, which grades each as its suite
    known.py     gsm8k, math500, aime24, aime25, amc; gpqa, mmlu_pro; humaneval, mbpp; ifeval
    bfcl.py      calls of functions, and the environment `functions`, which shows them

It plugs in as suites, tables, rewards and envs of tandem/registry.py.
"""
