"""Rewards that grade answers and programs, and the sandbox for code that a model wrote.

For anyone who trains on mathematics, choices or code. docs/guide/rewards.md has every reward with
an example and a comparison of graders, docs/guide/sandbox.md the guarantees of the sandbox.

    rewards.py      `answer`, `numeric`, `choice`: they read the final answer of a completion
    answer*.py      finds the final answer, and compares it as number, list, text or formula
    code.py         `code`: a program's tests; no expected value enters the solution's process
    code_tests.py   reads tests in the forms of MBPP, HumanEval, APPS, LiveCodeBench, KodCode
    code_inside.py, code_tester.py   run in the sandbox, beside the solution and beside the tests
    judge.py        `judge`: a language model behind a server scores the completion
    python_env.py   the environment `python`: a model writes code and reads its output
    sandbox/        bubblewrap, a SandboxFusion server, or plain processes

It plugs in as rewards, envs, sandboxes and extractors of tandem/registry.py. Formulas need
math-verify, which workers of `answer` import at their start; the rest needs no package.
"""
