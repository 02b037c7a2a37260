"""lm-evaluation-harness and Inspect against the server, on tasks made up here."""

import pytest

from tests.support.waiting import WAIT_S

SUMS = [{"question": f"1 + {n} =", "answer": n % 2} for n in range(4)]


def test_lm_evals_likelihoods_are_the_trainers_to_the_last_bit(tiny, url):
    lm_eval = pytest.importorskip("lm_eval", reason="needs make adapters (lm-eval)")
    import datasets

    about = {
        "task": "sums",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(SUMS)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": [" 2", " 3"],
        "doc_to_target": "answer",
    }
    server = {"model": "tiny", "base_url": f"{url}/v1/completions", "timeout": WAIT_S}
    server["tokenizer"] = tiny.renderer.tokenizer.name_or_path
    found = lm_eval.simple_evaluate("local-completions", server, [about], bootstrap_iters=0)
    samples = found["samples"]["sums"]
    assert len(samples) == len(SUMS)
    for sample in samples:
        pairs = zip(sample["arguments"], sample["resps"], strict=True)
        for (context, choice), [(likelihood, _)] in pairs:
            scores = tiny.twin.score(tiny.texts.encode(context + choice))
            first = len(tiny.texts.encode(context)) - 1
            assert likelihood == sum(scores[first:].tolist())
        assert len(sample["resps"]) == 2


def test_inspect_gets_the_engines_answers(tiny, url, tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai", reason="needs make adapters (inspect-ai)")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    task = inspect_ai.Task(
        dataset=[Sample(input=row["question"], target="2") for row in SUMS],
        solver=generate(),
        scorer=includes(),
        config=GenerateConfig(seed=3, max_tokens=8),
    )
    model = get_model("openai-api/tandem/tiny", base_url=f"{url}/v1", api_key="none")
    [log] = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    for row, sample in zip(SUMS, log.samples, strict=True):
        [prompt] = tiny.renderer.prompts([[{"role": "user", "content": row["question"]}]])
        assert sample.output.completion == tiny.complete(prompt, seed=3, max_new_tokens=8).text
