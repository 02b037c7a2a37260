"""Act: problems -> episodes, token in, token out. Knows the engine as `Generate` and the chat as `Renderer` only."""

from collections.abc import Sequence

import numpy as np

from tandem.draws import address
from tandem.types import Completion, Env, Episode, Generate, Problem, Renderer, Request, SamplingParams


def run_episodes(
    problems: Sequence[Problem], *, group_size: int, place: tuple[int | str, ...], engine: Generate, renderer: Renderer,
    env: Env, params: SamplingParams,
) -> list[tuple[Episode, ...]]:  # fmt: skip
    """G episodes of each problem. Their draws are addressed by (place, row, uid, sample), so a problem that occurs
    twice in a step is sampled anew."""
    prompts = renderer.prompts([env.reset(problem) for problem in problems])
    requests = [
        Request(key=address(*place, row, problem.uid, sample), prompt=prompt, params=params)
        for row, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
        for sample in range(group_size)
    ]
    completions = engine.generate(requests)
    episodes = [
        _episode(problems[number // group_size], number % group_size, request.prompt, completion)
        for number, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]
    return [tuple(episodes[start : start + group_size]) for start in range(0, len(episodes), group_size)]


def _episode(problem: Problem, sample: int, prompt: np.ndarray, completion: Completion) -> Episode:
    before, count = len(prompt), len(completion.tokens)
    return Episode(
        uid=problem.uid,
        sample_index=sample,
        tokens=np.concatenate([prompt, completion.tokens]),
        loss_mask=np.arange(before + count) >= before,
        engine_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        weight_versions=np.concatenate([np.full(before, -1, np.int32), completion.weight_versions]),
        num_prompt_tokens=before,
        text=completion.text,
        stop_reason=completion.stop_reason,
    )
