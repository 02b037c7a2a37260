"""The commands that train, as jobs for drive.py: cheapest check first, data, tokenizer, model, and only then workers.

training_job   problems -> episodes -> rewards -> updates     tandem train     loop.py
distill_job    problems -> episodes -> teacher -> updates     tandem distill   loop.py
sft_job        chats -> updates                               tandem sft
dpo_job        pairs -> updates                               tandem dpo
rm_job         pairs -> updates of a reward model             tandem rm
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.build import (
    Report,
    build_engine,
    build_learner,
    build_model,
    build_reference,
    check_exactness,
    evaluator,
    input_hashes,
    learning_models,
    prepare_process,
    read_data,
    require_room,
    reward_pool,
    student_and_teacher,
)  # fmt: skip
from tandem.config import Config
from tandem.data.chats import read_chats
from tandem.data.preferences import Preference, read_preferences
from tandem.data.problems import problems_of_step
from tandem.data.render import ChatRenderer, load_renderer
from tandem.drive import Job
from tandem.envs.single_turn import SingleTurn
from tandem.errors import UserError
from tandem.evaluate import sampling_params
from tandem.loop import Clock, Progress, Stages, distill_step, train_step
from tandem.model.load import ExactModel, check_model
from tandem.rl.losses import Metrics
from tandem.stream.journal import read_groups
from tandem.train.fixed import answer_pair, fit, fit_pairs, fit_scores, pair_loss, score_loss, scored_pair
from tandem.train.learn import Models
from tandem.train.pack import pack
from tandem.types import Microbatch, Problem, Row, Sample
from tandem.weights.inline import InlineSync

T = TypeVar("T")


@contextmanager
def training_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem train`."""
    if config.model.reference and not config.rl.kl_coef:
        raise UserError("a setting that would never be used", where=f"model.reference = {config.model.reference}",
                        found="rl.kl_coef = 0", expected="a KL term", next="set rl.kl_coef, or drop it")  # fmt: skip
    with _problems_job(config, episodes, report, learning_models, train_step) as job:
        yield job


@contextmanager
def distill_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem distill`."""
    if not config.distill.teacher:
        raise _missing("no teacher is named", "distill.teacher", "a Hugging Face directory or hub name")
    check_model(config.distill.teacher)
    with _problems_job(config, episodes, report, student_and_teacher, distill_step) as job:
        yield job


@contextmanager
def _problems_job(
    config: Config, episodes: Path, report: Report, make: Callable[[Config], Models],
    step: Callable[[Stages, int], tuple[Row, Row]],
) -> Iterator[Job]:  # fmt: skip
    """A job whose episodes are sampled on the way."""
    prepare_process(config)
    data = read_data(config, "data.train", "eval.data")
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    problems = renderer.check_lengths(data["data.train"], config.data)
    held_out = renderer.check_lengths(data["eval.data"], config.data, key="eval.data") if data["eval.data"] else []
    _check_curriculum(config, problems)
    models = make(config)
    exact = check_exactness(config, models.policy.model, report)
    engine = build_engine(config, models.policy.model, renderer)
    require_room(config, engine, renderer, [*problems, *held_out])
    sync = InlineSync(engine)
    with reward_pool(config) as reward:
        stages = Stages(
            config=config, problems=problems, renderer=renderer, env=SingleTurn(), engine=engine, reward=reward, models=models,
            sync=sync, params=sampling_params(config.rollout, renderer.stop_token_ids), episodes=episodes, exact=exact,
        )  # fmt: skip
        critic = {} if models.critic is None else {"critic": models.critic}
        yield Job(
            learners={"policy": models.policy, **critic}, data=input_hashes(config), steps=config.run.steps,
            eval_every=config.eval.every, publish=sync.publish, step=lambda done: step(stages, done),
            evaluate=evaluator(config, held_out, engine, renderer, reward, episodes),
            state=lambda: _state(stages.progress), restore=lambda done, state: _restore(stages, done, state),
        )  # fmt: skip


def _check_curriculum(config: Config, problems: Sequence[Problem]) -> None:
    if config.rl.curriculum and len(problems) < config.rl.prompts_per_step:
        raise UserError("a curriculum picks every problem at most once a step", where="rl.prompts_per_step",
                        found=f"{config.rl.prompts_per_step}, of {len(problems)} problems",
                        expected=f"at most {len(problems)}", next=f"rl.prompts_per_step={len(problems)}")  # fmt: skip


def _state(progress: Progress) -> dict[str, Any]:
    return {"batches": progress.batches, "baseline": progress.baseline, "rates": progress.rates}


def _restore(stages: Stages, done: int, state: dict[str, Any]) -> None:
    """Carried groups are read back from the journal of the step that carried them."""
    progress = stages.progress
    progress.batches, progress.baseline, progress.rates = state["batches"], state["baseline"], state["rates"]
    if stages.config.rl.max_gen_batches:
        problems = {problem.uid: problem for problem in stages.problems}
        progress.carried = read_groups(stages.episodes / f"train_step_{done:06d}.parquet", problems, "carry")


@contextmanager
def sft_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem sft`."""
    prepare_process(config)
    settings = config.sft
    if not settings.train:
        raise _missing("no chats are named", "sft.train", "a JSONL or Parquet file of chats")
    chats = read_chats(settings.train, key="sft.train")
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    samples = [Sample(tokens=t, loss_mask=mask) for t, mask in renderer.trainings(chats, loss=settings.loss_on)]
    model = build_model(config, config.model.path)
    check_fit(samples, model.config.max_position_embeddings, "sft.train, chat")
    policy = build_learner(config, model, steps=settings.steps, learning_rate=settings.learning_rate,
                           schedule=settings.schedule, warmup_steps=settings.warmup_steps)  # fmt: skip

    def step(picked: list[Sample]) -> Metrics:
        return fit(policy, pack(picked, config.train.tokens_per_microbatch))

    with _generating(config, model, renderer, episodes) as (publish, evaluate):
        yield Job(
            learners={"policy": policy}, data=input_hashes(config), steps=settings.steps, eval_every=0, publish=publish,
            step=_step(config, samples, settings.batch_size, step, publish), evaluate=evaluate,
        )  # fmt: skip


@contextmanager
def dpo_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem dpo`."""
    prepare_process(config)
    settings = config.preference
    train, test, renderer = _pairs(config)
    samples, held_out = _pair_samples(train, renderer, answer_pair), _pair_samples(test, renderer, answer_pair)
    model = build_model(config, config.model.path)
    _check_pairs(config, samples, held_out, model)
    policy = build_learner(config, model, steps=settings.steps, learning_rate=settings.learning_rate,
                           schedule=settings.schedule, warmup_steps=settings.warmup_steps)  # fmt: skip
    reference = build_reference(config, model)

    def step(picked: list[list[Sample]]) -> Metrics:
        return fit_pairs(policy, reference, _pack_pairs(picked, config), settings)

    with _generating(config, model, renderer, episodes) as (publish, evaluate):
        yield Job(
            learners={"policy": policy}, data=input_hashes(config), steps=settings.steps, eval_every=config.eval.every,
            publish=publish, step=_step(config, samples, settings.batch_size, step, publish),
            evaluate=lambda done: {
                **_pair_accuracy(held_out, config, lambda batch: pair_loss(model, reference, batch, settings)), **evaluate(done)
            },
        )  # fmt: skip


@contextmanager
def rm_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem rm`: a sequence classifier with one label, its score read at the last token."""
    prepare_process(config)
    settings = config.preference
    train, test, renderer = _pairs(config)
    samples, held_out = _pair_samples(train, renderer, scored_pair), _pair_samples(test, renderer, scored_pair)
    model = build_model(config, config.model.path, head="value")
    _check_pairs(config, samples, held_out, model)
    scorer = build_learner(config, model, steps=settings.steps, learning_rate=settings.learning_rate,
                           schedule=settings.schedule, warmup_steps=settings.warmup_steps)  # fmt: skip

    def step(picked: list[list[Sample]]) -> Metrics:
        return fit_scores(scorer, _pack_pairs(picked, config))

    yield Job(
        learners={"scorer": scorer}, data=input_hashes(config), steps=settings.steps, eval_every=config.eval.every,
        publish=_to_nobody, step=_step(config, samples, settings.batch_size, step, _to_nobody),
        evaluate=lambda done: _pair_accuracy(held_out, config, lambda batch: score_loss(model, batch)),
    )  # fmt: skip


@contextmanager
def _generating(
    config: Config, model: ExactModel, renderer: ChatRenderer, episodes: Path
) -> Iterator[tuple[Callable[[int], None], Callable[[int], Row]]]:
    """(publish, evaluate on eval.data) of an engine over the model, for jobs that sample nothing else."""
    held_out = read_data(config, "eval.data")["eval.data"]
    engine = build_engine(config, model, renderer)
    with reward_pool(config) as reward:
        yield InlineSync(engine).publish, evaluator(config, held_out, engine, renderer, reward, episodes)


def _to_nobody(version: int) -> None:
    """No engine runs a reward model."""


def _step(
    config: Config, items: Sequence[T], batch_size: int, update: Callable[[list[T]], Metrics], publish: Callable[[int], None]
) -> Callable[[int], tuple[Row, Row]]:  # fmt: skip
    """A job's step over fixed items, in addressed shuffles; the weights after it are published."""

    def step(done: int) -> tuple[Row, Row]:
        clock = Clock()
        with clock("learn_s"):
            metrics = update(problems_of_step(items, done, batch_size, config.run.seed, config.data.shuffle))
        publish(done + 1)
        return metrics, clock.timings(tokens=0)

    return step


def _pairs(config: Config) -> tuple[list[Preference], list[Preference], ChatRenderer]:
    if not config.preference.train:
        raise _missing("no pairs are named", "preference.train", "a JSONL or Parquet file of prompt, chosen, rejected")
    train = read_preferences(config.preference.train, key="preference.train")
    test = read_preferences(config.preference.test, key="preference.test") if config.preference.test else []
    check_model(config.model.path)
    return train, test, load_renderer(config.model.path)


def _pair_samples(
    pairs: Sequence[Preference], renderer: ChatRenderer, make: Callable[..., list[Sample]]
) -> list[list[Sample]]:
    chats = [(*pair.prompt, *answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    rendered = renderer.trainings(chats, loss="last")
    return [make(number, *rendered[2 * number : 2 * number + 2]) for number in range(len(pairs))]


def _pack_pairs(pairs: Sequence[Sequence[Sample]], config: Config) -> list[Microbatch]:
    return pack([sample for pair in pairs for sample in pair], config.train.tokens_per_microbatch, keep_groups=True)


@torch.no_grad()
def _pair_accuracy(
    pairs: Sequence[Sequence[Sample]], config: Config, loss: Callable[[Microbatch], tuple[Tensor, Metrics]]
) -> Row:
    """Means over held-out pairs, under "eval/"."""
    sums: Row = {}
    for batch in _pack_pairs(pairs, config):
        for name, part in loss(batch)[1].items():
            sums[name] = sums.get(name, 0.0) + part
    return {f"eval/{name}": part / len(pairs) for name, part in sums.items()}


def check_fit(samples: Sequence[Sample], limit: int, what: str) -> None:
    """Refuse what the model has no positions for."""
    row, longest = max(enumerate(len(sample.tokens) for sample in samples), key=lambda pair: pair[1])
    if longest > limit:
        raise UserError(f"a {what.rpartition(' ')[2]} is longer than the model can place", where=f"{what} {row + 1}",
                        found=f"{longest:,} tokens", expected=f"at most {limit:,}", next="shorten or drop it")  # fmt: skip


def _check_pairs(
    config: Config, train: Sequence[Sequence[Sample]], test: Sequence[Sequence[Sample]], model: ExactModel
) -> None:
    for name, pairs in (("train", train), ("test", test)):
        for half in range(2) if pairs else ():
            limit = model.config.max_position_embeddings + 1
            check_fit([pair[half] for pair in pairs], limit, f"preference.{name}, pair")


def _missing(what: str, key: str, expected: str) -> UserError:
    return UserError(what, where=key, expected=expected, next=f"add {key}=...")
