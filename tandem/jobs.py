"""The commands that train, as jobs for drive.py: cheapest check first, data, tokenizer, model, and only then workers.

training_job   problems -> episodes -> rewards -> updates     tandem train     loop.py
distill_job    problems -> episodes -> teacher -> updates     tandem distill   loop.py
sft_job        chats -> updates                               tandem sft
dpo_job        pairs -> updates                               tandem dpo
rm_job         pairs -> updates of a reward model             tandem rm
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem import numerics
from tandem.build import (
    Report,
    build_engine,
    build_learner,
    build_model,
    build_reference,
    check_models,
    evaluator,
    input_hashes,
    learning_models,
    playground,
    prepare_process,
    read_data,
    require_parity,
    require_room,
    rollout_side,
    student_and_teacher,
    tell_exactness,
)  # fmt: skip
from tandem.config import Config
from tandem.data.chats import read_chats
from tandem.data.mixture import only, problems_of_step
from tandem.data.preferences import read_preferences
from tandem.data.render import ChatRenderer, load_renderer
from tandem.drive import Job, Stepped
from tandem.errors import UserError
from tandem.evaluate import sampling_params
from tandem.loop import Stages, Update, imitate, train_step, update
from tandem.loop_async import rollouts_ahead, train_step_async
from tandem.model.load import ExactModel
from tandem.model.probe import Exactness
from tandem.model.text import load_tokenizer
from tandem.play import Clock
from tandem.rl.losses import Metrics
from tandem.run import RunFolder, identity
from tandem.stream.recall import Journal
from tandem.train.fixed import answer_pair, fit, fit_pairs, fit_scores, pair_loss, score_loss, scored_pair
from tandem.train.learn import Models
from tandem.train.pack import pack
from tandem.types import Microbatch, Problem, Row, Sample
from tandem.weights.inline import InlineSync

T = TypeVar("T")


@contextmanager
def training_job(config: Config, run: RunFolder, report: Report) -> Iterator[Job]:
    """`tandem train`."""
    if config.model.reference and not config.rl.kl_coef:
        raise UserError("a setting that would never be used", where=f"model.reference = {config.model.reference}",
                        found="rl.kl_coef = 0", expected="a KL term", next="set rl.kl_coef, or drop it")  # fmt: skip
    others = ("model.reference", *(["critic.path"] if config.rl.advantage == "gae" else []))
    with _problems_job(config, run, report, others, learning_models, update) as job:
        yield job


@contextmanager
def distill_job(config: Config, run: RunFolder, report: Report) -> Iterator[Job]:
    """`tandem distill`."""
    if not config.distill.teacher:
        raise _missing("no teacher is named", "distill.teacher", "a Hugging Face directory or hub name")
    if config.rl.kl_coef or config.rl.max_gen_batches:
        raise UserError("distillation has no reference and no groups to choose from", where="tandem distill",
                        found=f"rl.kl_coef = {config.rl.kl_coef}, rl.max_gen_batches = {config.rl.max_gen_batches}",
                        expected="0 for both", next="add rl.kl_coef=0 rl.max_gen_batches=0")  # fmt: skip
    check_models(config, "distill.teacher")
    if load_tokenizer(config.distill.teacher).get_vocab() != load_tokenizer(config.model.path).get_vocab():
        raise UserError("teacher and student do not read the same tokens", where=f"distill.teacher = {config.distill.teacher}",
                        found="another tokenizer", expected=f"that of {config.model.path}",
                        next="take a teacher of the same family")  # fmt: skip
    with _problems_job(config, run, report, ("distill.teacher",), student_and_teacher, imitate) as job:
        yield job


@contextmanager
def _problems_job(
    config: Config, run: RunFolder, report: Report, others: Sequence[str], make: Callable[[Config], Models], update: Update,
) -> Iterator[Job]:  # fmt: skip
    """A job whose episodes are sampled on the way."""
    prepare_process(config)
    data = read_data(config, "data.train")
    held_out = read_data(config, "eval.data")
    check_models(config, *others)
    renderer = load_renderer(config.model.path)
    problems = only(data, renderer.check_lengths(data, config.data))
    held_out = _of_fitting_length(held_out, renderer, config)
    _check_curriculum(config, problems)
    inputs = input_hashes(config, "data.train", "eval.data")
    journal, eval_journal = (Journal(run.episodes, identity(config, inputs), of) for of in (problems, held_out))
    with playground(config) as player_of:
        models = make(config)
        found = tell_exactness(
            config, models.policy.model, report, workers=config.rollout.workers, beside=models.others
        )
        exact = require_parity(config, found)
        _note_machine(run, found, report)
        engine = build_engine(config, models.policy.model, renderer)
        require_room(config, engine, renderer, [*problems, *held_out])
        local = player_of(engine, renderer)
        with rollout_side(config, engine, local, report) as (player, sync, leave):
            stages = Stages(
                config=config, problems=problems, player=player, models=models, sync=sync, journal=journal, exact=exact,
                params=sampling_params(config.rollout, renderer.stop_token_ids),
            )  # fmt: skip
            critic = {} if models.critic is None else {"critic": models.critic}
            job = Job(
                learners={"policy": models.policy, **critic}, data=inputs, steps=config.run.steps, eval_every=config.eval.every,
                publish=sync.publish, step=lambda done: train_step(stages, done, update),
                evaluate=evaluator(config, held_out, local, renderer.stop_token_ids, eval_journal),
                restore=lambda done, state: _restore(stages, done, state),
            )  # fmt: skip
            journal.clean()
            if not config.rollout.staleness:
                yield job
                return
            with rollouts_ahead(stages, config.run.steps, leave) as ahead:
                yield replace(
                    job, begin=ahead.begin, settled=ahead.settled, hurry=ahead.hurry,
                    step=lambda done: train_step_async(ahead, done, update),
                )  # fmt: skip


def _note_machine(run: RunFolder, found: Exactness, report: Report) -> None:
    """Write the processor to machine.json, and report it if it has changed."""
    if news := run.note_machine(numerics.processor(), not found.thread_dependent):
        report(news)


def _check_curriculum(config: Config, problems: Sequence[Problem]) -> None:
    if config.rl.curriculum and len(problems) < config.rl.prompts_per_step:
        raise UserError("a curriculum picks every problem at most once a step", where="rl.prompts_per_step",
                        found=f"{config.rl.prompts_per_step}, of {len(problems)} problems",
                        expected=f"at most {len(problems)}", next=f"rl.prompts_per_step={len(problems)}")  # fmt: skip


def _restore(stages: Stages, done: int, state: dict[str, Any]) -> None:
    """Groups that a step left to the next are read back from its file in the journal."""
    leaves = stages.config.rl.max_gen_batches or stages.config.rollout.token_budget
    known = stages.journal.read(done) if leaves and done else None
    if leaves and done and known is None:
        raise UserError("the journal does not have what the checkpoint's step left to the next", where=str(stages.journal.folder),
                        found=f"no file of this run for step {done}", expected=f"train_step_{done:06d}.parquet",
                        next="restore it from a copy, or start over with --fresh (the old run is kept beside it)")  # fmt: skip
    stages.progress.restore(state, known[0] if known else [])


@contextmanager
def sft_job(config: Config, run: RunFolder, report: Report) -> Iterator[Job]:
    """`tandem sft`."""
    prepare_process(config)
    settings = config.sft
    if not settings.train:
        raise _missing("no chats are named", "sft.train", "a JSONL or Parquet file of chats")
    chats, held_out = read_chats(settings.train, key="sft.train"), read_data(config, "eval.data")
    shape, renderer = check_models(config), load_renderer(config.model.path)
    samples = [Sample(tokens=t, loss_mask=mask) for t, mask in renderer.trainings(chats, loss=settings.loss_on)]
    _check_fit(samples, shape, "a chat", "sft.train, chat")
    policy = build_learner(config, build_model(config, config.model.path), settings, settings.steps)
    _note_machine(run, tell_exactness(config, policy.model, report), report)

    def step(picked: list[Sample]) -> Metrics:
        return fit(policy, pack(picked, config.train.tokens_per_microbatch))

    inputs = input_hashes(config, "sft.train", "eval.data")
    with _generating(config, policy.model, renderer, held_out, run, inputs) as (publish, evaluate):
        yield Job(
            learners={"policy": policy}, data=inputs,
            steps=settings.steps, eval_every=0, publish=publish,
            step=_step(config, samples, settings.batch_size, step, publish), evaluate=evaluate,
        )  # fmt: skip


@contextmanager
def dpo_job(config: Config, run: RunFolder, report: Report) -> Iterator[Job]:
    """`tandem dpo`."""
    prepare_process(config)
    settings, held_out = config.preference, read_data(config, "eval.data")
    train, test, renderer = _pairs(config, answer_pair, "model.reference")
    policy = build_learner(config, build_model(config, config.model.path), settings, settings.steps)
    reference = build_reference(config, policy.model)
    _note_machine(run, tell_exactness(config, policy.model, report), report)

    def step(picked: list[list[Sample]]) -> Metrics:
        return fit_pairs(policy, reference, _pack_pairs(picked, config), settings)

    def accuracy() -> Row:
        return _pair_accuracy(test, config, lambda batch: pair_loss(policy.model, reference, batch, settings))

    inputs = input_hashes(config, "preference.train", "preference.test", "eval.data")
    with _generating(config, policy.model, renderer, held_out, run, inputs) as (publish, evaluate):
        yield Job(
            learners={"policy": policy}, data=inputs,
            steps=settings.steps, eval_every=config.eval.every,
            publish=publish, step=_step(config, train, settings.batch_size, step, publish),
            evaluate=lambda done: {**accuracy(), **evaluate(done)},
        )  # fmt: skip


@contextmanager
def rm_job(config: Config, run: RunFolder, report: Report) -> Iterator[Job]:
    """`tandem rm`: a sequence classifier with one label, its score read at the last token."""
    prepare_process(config)
    settings = config.preference
    train, test, renderer = _pairs(config, scored_pair)
    padding = renderer.tokenizer.pad_token_id
    if padding in {int(sample.tokens[-2]) for pair in [*train, *test] for sample in pair}:
        raise UserError(
            "the chat template ends with the padding token, so transformers would read a score one token early",
            where=f"tokenizer of {config.model.path}", found=repr(renderer.tokenizer.pad_token),
            expected="a padding token of its own", next="name another pad_token in its tokenizer_config.json",
        )  # fmt: skip
    scorer = build_learner(config, build_model(config, config.model.path, head="value"), settings, settings.steps)
    _note_machine(run, tell_exactness(config, scorer.model, report), report)
    scorer.model.config.pad_token_id = padding  # by which stock transformers finds the last token

    def step(picked: list[list[Sample]]) -> Metrics:
        return fit_scores(scorer, _pack_pairs(picked, config))

    yield Job(
        learners={"scorer": scorer}, data=input_hashes(config, "preference.train", "preference.test"),
        steps=settings.steps, eval_every=config.eval.every,
        publish=_to_nobody, step=_step(config, train, settings.batch_size, step, _to_nobody),
        evaluate=lambda done: _pair_accuracy(test, config, lambda batch: score_loss(scorer.model, batch)),
    )  # fmt: skip


def _of_fitting_length(held_out: Sequence[Problem], renderer: ChatRenderer, config: Config) -> list[Problem]:
    return renderer.check_lengths(held_out, config.data, key="eval.data") if held_out else []


@contextmanager
def _generating(
    config: Config,
    model: ExactModel,
    renderer: ChatRenderer,
    held_out: Sequence[Problem],
    run: RunFolder,
    inputs: dict[str, str],
) -> Iterator[tuple[Callable[[int], None], Callable[[int], Row]]]:
    """(publish, evaluate on eval.data) of an engine over the model, for jobs that sample nothing else."""
    engine = build_engine(config, model, renderer)
    if fitting := _of_fitting_length(held_out, renderer, config):
        require_room(config, engine, renderer, fitting)
    with playground(config) as player_of:
        player = player_of(engine, renderer)
        journal = Journal(run.episodes, identity(config, inputs), fitting)
        journal.clean()
        yield InlineSync(engine).publish, evaluator(config, fitting, player, renderer.stop_token_ids, journal)


def _to_nobody(version: int) -> None:
    """No engine runs a reward model."""


def _step(
    config: Config, items: Sequence[T], batch_size: int, update: Callable[[list[T]], Metrics], publish: Callable[[int], None]
) -> Callable[[int], Stepped]:  # fmt: skip
    """A job's step over fixed items, in addressed shuffles; the weights after it are published."""

    def step(done: int) -> Stepped:
        clock = Clock()
        with clock("learn_s"):
            metrics = update(problems_of_step(items, done, batch_size, config.run.seed, config.data.shuffle))
        publish(done + 1)
        return metrics, clock.timings(tokens=0), {}

    return step


def _pairs(
    config: Config, make: Callable[..., list[Sample]], *others: str
) -> tuple[list[list[Sample]], list[list[Sample]], ChatRenderer]:
    """(pairs to train on, held-out pairs, renderer); `make` makes the samples of a pair, others are models to look at."""
    paths = {"preference.train": config.preference.train, "preference.test": config.preference.test}
    if not config.preference.train:
        raise _missing("no pairs are named", "preference.train", "a JSONL or Parquet file of prompt, chosen, rejected")
    read = {key: read_preferences(path, key=key) if path else [] for key, path in paths.items()}
    shape = check_models(config, *others, head="value" if make is scored_pair else "tokens")
    renderer = load_renderer(config.model.path)
    made = []
    for key, pairs in read.items():
        chats = [(*pair.prompt, *answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        rendered = renderer.trainings(chats, loss="last")
        made.append([make(number, *rendered[2 * number : 2 * number + 2]) for number in range(len(pairs))])
        for half in (0, 1):
            _check_fit([pair[half] for pair in made[-1]], shape, "an answer", f"{key}, pair")
    return made[0], made[1], renderer


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


def _check_fit(samples: Sequence[Sample], shape: Any, what: str, where: str) -> None:
    """Refuse what the model has no positions for; nothing follows the last token, so it needs none."""
    limit = shape.max_position_embeddings + 1
    longest = max(range(len(samples)), key=lambda i: len(samples[i].tokens), default=0)
    if samples and (size := len(samples[longest].tokens)) > limit:
        raise UserError(f"{what} is longer than the model can place", where=f"{where} {longest + 1}",
                        found=f"{size:,} tokens", expected=f"at most {limit:,}", next="shorten or drop it")  # fmt: skip


def _missing(what: str, key: str, expected: str) -> UserError:
    return UserError(what, where=key, expected=expected, next=f"add {key}=...")
