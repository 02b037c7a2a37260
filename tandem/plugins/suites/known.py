r"""The known suites: for each where its rows lie, what a model is asked, and what grades it.

Mathematics: no examples; the sentence behind the problem is the one that the model cards of Qwen
and DeepSeek-R1 recommend; the grader reads `\boxed{...}`. Multiple choice: OpenAI's simple-evals,
without examples. HumanEval: as EvalPlus asks chat models; MBPP: as its paper, without the three
examples; a program counts if it passes all tests. IFEval: the prompt alone.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from string import ascii_uppercase
from typing import Any

from tandem.config.schema import Config
from tandem.plugins.suites import bfcl
from tandem.plugins.suites.suites import Suite, Values
from tandem.rewards.builtin import behind_thoughts
from tandem.rewards.parts import checked_by
from tandem.runtime import rng
from tandem.runtime.errors import UserError, not_installed
from tandem.types import Problem

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. "
    "Think step by step before answering.\n\n{question}\n\n{options}"
)
SCRIPT = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```\n{prompt}\n```\n"
)
EXPERT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
INSTRUCTIONS = "tandem.plugins.suites.known:follows_instructions"


def boxed(question: str, answer: Any) -> Values:
    return {"prompt": question.strip() + BOXED, "answer": str(answer)}


def gsm8k(row: Values, _: int) -> Values:
    """Take the number behind `####` of the whole solution (arXiv 2110.14168)."""
    return boxed(row["question"], row["answer"].rpartition("####")[2].replace(",", "").strip())


def problem(row: Values, _: int) -> Values:
    return boxed(row["problem" if "problem" in row else "question"], row["answer"])


def letter(question: str, options: Sequence[str], right: int) -> Values:
    letters = ascii_uppercase[: len(options)]
    lines = [f"{each}) {text}" for each, text in zip(letters, options, strict=True)]
    prompt = LETTER.format(letters=letters, question=question.strip(), options="\n".join(lines))
    return {"prompt": prompt, "answer": letters[right]}


def gpqa(row: Values, number: int) -> Values:
    """Order the four answers by draws of the row's number, the same in every run (arXiv
    2311.12022)."""
    names = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    names.sort(key=lambda name: rng.address(0, "gpqa", number, name))
    options = [row[name].strip() for name in names]
    return letter(row["Question"], options, names.index("Correct Answer"))


def mmlu_pro(row: Values, _: int) -> Values:
    return letter(row["question"], row["options"], row["answer_index"])


def humaneval(row: Values, _: int) -> Values:
    prompt = SCRIPT.format(prompt=row["prompt"].strip())
    return {"prompt": prompt, "answer": "", "test": row["test"], "entry_point": row["entry_point"]}


def mbpp(row: Values, _: int) -> Values:
    prompt = EXPERT.format(text=row["text"].strip(), tests="\n".join(row["test_list"]))
    tests = {name: row[name] for name in ("test_list", "test_setup_code")}
    return {"prompt": prompt, "answer": "", **tests}


def ifeval(row: Values, _: int) -> Values:
    names = ("key", "prompt", "instruction_id_list", "kwargs")
    return {"prompt": row["prompt"], "answer": "", "ifeval": {name: row[name] for name in names}}


def check_ifeval(_: Config) -> None:
    """Load what NLTK splits sentences by, unless it is there."""
    if find_spec("langdetect") is None:
        raise not_installed("langdetect", "evals", where="eval.data")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        if not nltk.download("punkt_tab", quiet=True):
            raise UserError(
                "ifeval cannot count sentences",
                where="eval.data",
                found="NLTK has no punkt_tab, and cannot download it",
                next="python -m nltk.downloader punkt_tab, where there is a network",
            ) from None


def check_bfcl(config: Config) -> None:
    if config.env.name != "functions":
        what, found = "bfcl shows functions to the model", f"env.name = {config.env.name}"
        raise UserError(what, where="eval.data", found=found, next="env.name=functions")


def _import_ahead(_: Mapping[str, Any]) -> None:
    from lm_eval.tasks.ifeval import utils  # noqa: F401


@checked_by(_import_ahead)
@behind_thoughts
def follows_instructions(problem: Problem, completion: str) -> float:
    """Return 1 if all instructions of a row of IFEval are followed (arXiv 2311.07911, strict), by
    lm-evaluation-harness's checks."""
    from langdetect import DetectorFactory
    from lm_eval.tasks.ifeval.utils import process_results

    DetectorFactory.seed = 0  # else it draws
    found = process_results(problem.metadata["ifeval"], [completion])
    return float(found["prompt_level_strict_acc"])


SUITES = {
    "gsm8k": Suite("openai/gsm8k:main#test", gsm8k, "answer"),
    "math500": Suite("HuggingFaceH4/MATH-500#test", problem, "answer"),
    "aime24": Suite("HuggingFaceH4/aime_2024#train", problem, "answer"),
    "aime25": Suite("math-ai/aime25#test", problem, "answer"),
    "amc": Suite("math-ai/amc23#test", problem, "answer"),
    "gpqa": Suite("Idavidrein/gpqa:gpqa_diamond#train", gpqa, "choice"),
    "mmlu_pro": Suite("TIGER-Lab/MMLU-Pro#test", mmlu_pro, "choice"),
    "humaneval": Suite("openai/openai_humaneval#test", humaneval, "code"),
    "mbpp": Suite("google-research-datasets/mbpp:full#test", mbpp, "code"),
    "ifeval": Suite("google/IFEval#train", ifeval, INSTRUCTIONS, check_ifeval),
    "bfcl": Suite(
        "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        bfcl.columns,
        "tandem.plugins.suites.bfcl:right_calls",
        check_bfcl,
        bfcl.rows,
        bfcl.files,
    ),
}
