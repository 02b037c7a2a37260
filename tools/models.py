"""`make models`: every architecture that tests/support/architectures.py has, as a tiny random model;
results in results/models.json, and results/models.md from it.

    make models                               gap, export and adapters of all
    make models only="gemma2 phi"             of these; the results of the others stay as they are
    make models only="gemma2" speeds=1        decode against `generate` in place of all that, on a machine that
                                              does nothing else

gap       largest difference of engine and policy log-probs over SCHEDULES random schedules, with an
          optimizer step after each
export    what `tandem export` writes, loaded by transformers: its logits are those of transformers with the
          trained weights
adapters  the gap with an adapter on every linear of the layers, over LORA_SCHEDULES
speeds    tokens a second of 48 tokens after 8 prompts of 64, sides by turns, medians of ROUNDS

Exit code 1 if an architecture is not exact, but for those of the inexact path, whose gap is rounding.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from tandem.model.load import ExactModel, make_exact  # noqa: E402
from tandem.model.lora import Lora  # noqa: E402
from tandem.model.paths import divisible  # noqa: E402
from tandem.model.tiny import make_tokenizer  # noqa: E402
from tandem.run_folder.export import export  # noqa: E402
from tandem.runtime import numerics  # noqa: E402
from tandem.runtime.errors import UserError  # noqa: E402
from tandem.types import Request, SamplingParams  # noqa: E402
from tests.support.architectures import ARCHITECTURES, INEXACT, LEAN, MORE, exact, inexact, stock  # noqa: E402
from tests.support.parity import engine_for, gaps_of_model, parity_of_model  # noqa: E402

JSON, PAGE = ROOT / "results" / "models.json", ROOT / "results" / "models.md"
SCHEDULES, LORA_SCHEDULES, INEXACT_SCHEDULES = 50, 5, 9  # the tenth has long prompts
BATCH, PROMPT, NEW, ROUNDS = 8, 64, 48, 3
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=7)
# For speeds: 8 layers of width 512. What is not among a config's names is ignored by it.
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "ffn_dim": 1376,
    "n_inner": 1376,
    "word_embed_proj_dim": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "sliding_window": 512,
}

Found = dict[str, Any]


def main(arguments: list[str]) -> int:
    names, speeds = [a for a in arguments if a != "--speeds"], "--speeds" in arguments
    every = sorted(everything() if speeds else {**ARCHITECTURES, **MORE, **LEAN, **INEXACT})
    if unknown := sorted(set(names) - set(every)):
        print(f"unknown architecture: {', '.join(unknown)}; there are {', '.join(every)}")
        return 2
    numerics.prepare()
    wrong = []
    for name in names or every:
        start = time.monotonic()
        where = f"{machine.describe()}; {date.today()}"
        if speeds:
            keep(name, {**decode(name), "speeds_on": where})
        else:
            found = {**try_out(name), "tried_on": where}
            wrong += [name] * (found["gap"] != 0.0 and name not in INEXACT)
            keep(name, {**found, "seconds": round(time.monotonic() - start)})
        PAGE.write_text(page())
        print(row(name, everything()[name]), flush=True)
    print(f"not exact: {', '.join(wrong)}" if wrong else "every gap of the exact paths is 0.0")
    return int(bool(wrong))


def try_out(name: str) -> Found:
    if name in INEXACT:
        return try_inexact(name)
    model = exact(name)
    tokens, gap = parity_of_model(model, SCHEDULES)
    found = {"lean": divisible(model.config), "tokens": tokens, "gap": gap, "schedules": SCHEDULES}
    return {**found, "export": exported(name, model), "adapters": adapted(name)}


def try_inexact(name: str) -> Found:
    """Return the largest and the mean gap, in place of none; an export's logits as of others."""
    model = inexact(name)
    tokens, largest, mean = gaps_of_model(model, INEXACT_SCHEDULES)
    found = {"tokens": tokens, "gap": largest, "mean": mean, "schedules": INEXACT_SCHEDULES}
    return {**found, "lean": False, "export": exported(name, model), "adapters": adapted(name)}


def exported(name: str, model: ExactModel) -> bool:
    """Tell whether an export has the logits of transformers with the trained weights, to the last
    bit."""
    twin, tokens = stock(name), torch.arange(60)[None]
    twin.load_state_dict(model.merged_weights(), strict=False)
    twin.tie_weights()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        make_tokenizer(characters="abc").save_pretrained(f"{folder}/tokenizer")
        export(model, f"{folder}/tokenizer", Path(folder) / "out", "# A model\n")
        again = AutoModelForCausalLM.from_pretrained(
            f"{folder}/out", attn_implementation="eager"
        ).eval()
        return torch.equal(again(input_ids=tokens).logits, twin(input_ids=tokens).logits)


def adapted(name: str) -> float | str:
    """Return the gap with adapters, or why there can be none."""
    try:
        model = inexact(name, LORA) if name in INEXACT else exact(name, LORA)
        return parity_of_model(model, LORA_SCHEDULES)[1]
    except UserError as error:
        return error.what


def decode(name: str) -> Found:
    """Measure tokens a second of the engine and of `generate`."""
    torch.set_num_threads(numerics.cores())
    twin = stock(name, **LARGER)
    twin.set_attn_implementation("sdpa" if twin._supports_sdpa else "eager")
    model = inexact(name, **LARGER) if name in INEXACT else make_exact(stock(name, **LARGER))
    prompts = np.random.default_rng(0).integers(0, LARGER["vocab_size"], (BATCH, PROMPT))
    params = SamplingParams(max_new_tokens=NEW)
    config = GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, pad_token_id=0, eos_token_id=None
    )
    requests = [Request(key=n, prompt=p, params=params) for n, p in enumerate(prompts)]
    inputs = torch.from_numpy(prompts)
    sides: dict[str, Callable[[], Any]] = {
        # an engine of its own each time: it would find the prompts in its cache
        "tokens_per_s": lambda: engine_for(model).generate(requests),
        "generate_per_s": lambda: twin.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        ),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(ROUNDS + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            with torch.no_grad():
                run()
            if number:  # the first one packs weights and meets new shapes
                seconds[side].append(time.perf_counter() - start)
    return {side: BATCH * NEW / statistics.median(times) for side, times in seconds.items()}


def keep(name: str, found: Found) -> None:
    before = everything()
    own = before.get(name, {})
    if "gap" in found:  # of the inexact path, which it may have left
        own.pop("mean", None)
    every = {**before, name: {**own, **found}}
    JSON.write_text(json.dumps(dict(sorted(every.items())), indent=1, ensure_ascii=False) + "\n")


def everything() -> dict[str, Found]:
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def page() -> str:
    told = everything()
    lines = [
        "# Models",
        "",
        "Written by `make models` (tools/models.py), an architecture at a time. Each is a tiny random "
        "model with transformers' `model_type`:",
        "the largest gap between the log-probs of engine and policy over random schedules, each "
        "followed by an optimizer step;",
        "whether transformers computes the same logits, to the last bit, from an export as from the "
        "trained weights;",
        "the gap with adapters on every linear of the layers; and decode against `generate` (48 "
        "tokens after 8 prompts of 64, 8 layers of width 512),",
        "where it was measured. Other architectures run too if their trial passes: a random model of "
        "their shapes, before weights are loaded.",
        "Sequences of a model with longrope (Phi 3 and 4) end at its original length, up to which it "
        "is exact. Experts have no adapters.",
        "Models that read images or sound have no row: tests/plugins/vision/test_image_model.py compares five of them with "
        "transformers, tests/model/test_text_part.py the language models of eight others.",
        "",
        "Where the layer is \"transformers', inexact\", attention, states and cache are transformers' "
        "own: the gap is rounding, in nats, the largest and the mean.",
        "Training such a model needs an off-policy correction "
        "([exactness](../docs/concepts/exactness.md#models-that-cannot-be-exact)).",
        "",
        "| `model_type` | layer | schedules | tokens | gap | export equal | gap with adapters | "
        "tok/s | `generate` |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(name, found) for name, found in told.items()),
        "",
    ]
    for what, key in (("Gaps", "tried_on"), ("Speeds", "speeds_on")):
        places = sorted({found[key] for found in told.values() if key in found})
        lines += [f"{what}: {place}." for place in places]
    return "\n".join(lines) + "\n"


def row(name: str, found: Found) -> str:
    speeds = [f"{found[k]:,.0f}" if k in found else "" for k in ("tokens_per_s", "generate_per_s")]
    adapters = found["adapters"]
    if "mean" in found and isinstance(adapters, float):
        adapters = f"{adapters:.1e}"
    cells = [
        f"`{name}`",
        "Tandem's" if found["lean"] else "transformers'" + ", inexact" * ("mean" in found),
        found["schedules"],
        f"{found['tokens']:,}",
        f"{found['gap']:.1e}, mean {found['mean']:.1e}" if "mean" in found else found["gap"],
        "yes" if found["export"] else "no",
        adapters,
        *speeds,
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
