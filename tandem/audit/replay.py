"""Learn a step of a run again, from the run folder, and compare every number with what the run
wrote.

    checkpoints/, or the starting weights --> learners
                                                 | the steps between, learned again
    episodes/train_step_N.parquet --> groups -->  update   --> metrics, weights, optimizer
                    |                               |                  |
          rewards scored again        log-probs of its tokens    equal to metrics.jsonl, ledger.jsonl, checkpoints/step_N ?

Nothing is generated and nothing written: what was sampled, and what environments, tools and judges
answered, is read back from the journal. `tandem sft`, `dpo` and `rm` have no journal; their steps
are functions of the data.

    tandem replay runs/demo --step 12
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from tandem.audit.rescore import Difference, rescored
from tandem.config.schema import Config
from tandem.jobs.engines import Report, prepare_process, probe_exactness, require_parity
from tandem.jobs.inputs import input_hashes
from tandem.jobs.models import build_distill_models, build_rl_models, check_models
from tandem.jobs.offline import open_dpo_job, open_rm_job, open_sft_job
from tandem.model.forward import batch_logprobs
from tandem.rollout.collect import Progress, make_rollout_batch, step_metrics
from tandem.rollout.evaluate import sampling_params
from tandem.run_folder.checkpoint import checkpoint_step, find_damage, load_checkpoint, step_name
from tandem.run_folder.episode_files import read_note
from tandem.run_folder.folder import RunFolder, read_machine
from tandem.run_folder.metrics import metrics_row
from tandem.run_folder.past_run import PastRun, altered, read_step, require_step
from tandem.runtime import numerics
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.step import learn_step
from tandem.train.batch import pack_batch
from tandem.train.learn import LearnStage, Observe
from tandem.train.learner import Learner
from tandem.types import Group, Row
from tandem.weights.hashing import tensor_hash, weight_hash

# inputs that replay does not need: what they gave is in the journal
_MAY_DIFFER = ("reward.function/", "env/")


@dataclass(kw_only=True)
class Verdict:
    """What a replay compared. `difference` is the first thing that is not as recorded; None: all of
    it is equal."""

    step: int
    begun: str = ""  # where the replay began
    episodes: int = 0  # scored again
    tokens: int = 0  # whose log-probs were computed again under the weights that sampled them
    metrics: Row = field(default_factory=dict)  # of the step's row, all equal
    weights: str = ""  # the hash, equal to the ledger's; empty where the ledger has none
    checkpoint: str = ""  # of the step, where it is still there and equal
    notes: list[str] = field(default_factory=list)  # what was not compared, and why
    difference: Difference | None = None


@dataclass(frozen=True, kw_only=True)
class Again:
    """A run's steps as functions of what its folder holds; `step` takes the number of steps already
    done."""

    learners: dict[str, Learner]
    data: dict[str, str]  # SHA-256 of its inputs as they are now
    step: Callable[[int, Observe | None], Row]
    restore: Callable[[int, dict[str, Any]], None]
    learning: LearnStage | None = None  # None where there are no episodes
    # what the rollouts of the last step leave to the next
    state: Callable[[], dict[str, Any]] = dict

    def hash(self) -> str:
        return weight_hash(next(iter(self.learners.values())).model.merged_weights())


def replay(
    past: PastRun, step: int, report: Report, observe: Observe | None = None, *, score: bool = True
) -> Verdict:
    """Learn step `step` again, counted from 1 as in metrics.jsonl, and say whether all is equal to
    the last bit.

    observe sees the step's updates; score: also score its episodes again. Raises UserError where
    the folder or an input is not what a replay can begin with.
    """
    require_step(past, step)
    if not past.ledger:
        report("this run has no ledger: weights can be compared only where there is a checkpoint")
    with _again(past, report) as again:
        verdict = Verdict(step=step)
        elsewhere = _other_machine(past)
        verdict.notes += changed_inputs(past, again.data) + elsewhere
        groups = _groups(past, again, step)
        done = _begin(past, again, min([step - 1, *_versions(groups)]), report, verdict)
        while done < step and verdict.difference is None:
            last = done + 1 == step
            verdict.difference = _sampled_otherwise(
                again, groups, step, done, verdict
            ) or _step_otherwise(
                past,
                again,
                done,
                verdict,
                observe if last else None,
                score and last,
                bool(elsewhere) and not last,
            )
            done += 1
        _hold_against_ledger(past, verdict)
        return verdict


def _hold_against_ledger(past: PastRun, verdict: Verdict) -> None:
    """Compare the folder's files and rows, up to this step, with the ledger's hashes. What differs
    becomes a note; if it is of this step, evaluations included, it is the difference."""
    changed = altered(past.folder, verdict.step)
    verdict.notes += [f"not as it was written: {one}" for one in changed]
    for one in changed:
        if one.step == verdict.step and one.found and verdict.difference is None:
            verdict.difference = Difference(
                what=f"SHA-256 of {one.what}", recorded=one.recorded, found=one.found
            )


@contextmanager
def _again(past: PastRun, report: Report) -> Iterator[Again]:
    match past.command:
        case "train" | "distill":
            yield _from_journal(past, report)
        case "sft" | "dpo" | "rm":
            make = {"sft": open_sft_job, "dpo": open_dpo_job, "rm": open_rm_job}[past.command]
            # its evaluation is not run, and the run's folder stays as it is
            with TemporaryDirectory() as place:
                elsewhere = RunFolder(
                    path=Path(place),
                    config=past.config,
                    command=past.command,
                    resumed=False,
                    log_descriptor=-1,
                )
                with make(past.config, elsewhere, report) as job:
                    yield Again(
                        learners=job.learners,
                        data=job.data,
                        restore=job.restore,
                        step=lambda done, observe: job.step(done).metrics,
                    )
        case other:
            raise UserError(
                "this command has no steps to replay",
                where=str(past.folder),
                found=f"a run of `tandem {other}`",
                expected="train, distill, sft, dpo or rm",
            )


def _from_journal(past: PastRun, report: Report) -> Again:
    config, teaches = past.config, past.command == "distill"
    prepare_process(config)
    data = input_hashes(config, "data.train", "eval.data")
    changed_inputs(past, data)  # before a model is loaded
    check_models(
        config,
        "distill.teacher" if teaches else "model.reference",
        *["critic.path"] * bool(config.critic.path),
    )
    models = build_distill_models(config) if teaches else build_rl_models(config)
    learning = LearnStage(
        config=config,
        models=models,
        sampling_params=sampling_params(config.rollout, ()),
        exact=require_parity(config, probe_exactness(config, models.policy.model, report)),
    )
    progress = Progress()

    def step(done: int, observe: Observe | None) -> Row:
        groups = read_step(past.journal(done + 1))
        carried, baseline = len(progress.carried), progress.baseline
        progress.batches += (
            len(groups) - carried - len(progress.unfinished)
        ) // config.rl.prompts_per_step
        progress.advance(groups, carried, config)
        batch = make_rollout_batch(done, groups, carried, baseline, progress)
        return step_metrics(batch, learn_step(learning, batch, observe), config)

    def restore(done: int, state: dict[str, Any]) -> None:
        leaves = config.rl.max_gen_batches or config.rollout.token_budget
        progress.restore(state, read_step(past.journal(done)) if leaves else [])

    critic = {} if models.critic is None else {"critic": models.critic}
    return Again(
        learners={"policy": models.policy, **critic},
        data=data,
        step=step,
        restore=restore,
        learning=learning,
        state=progress.state,
    )


def changed_inputs(past: PastRun, now: dict[str, str]) -> list[str]:
    """Notes on reward functions and environments that are not the run's any more. Raises UserError
    where data or a starting model is not: nothing that follows would be the run's step."""
    recorded = past.inputs()
    if recorded is None:
        return ["no checkpoint: whether data and starting weights are the run's is not checked"]
    changed = {
        key: now.get(key) for key in {**recorded, **now} if recorded.get(key) != now.get(key)
    }
    needed = [
        f"{key} ({'changed' if found else 'not there'})"
        for key, found in changed.items()
        if not key.startswith(_MAY_DIFFER)
    ]
    if needed:
        raise UserError(
            "a data file or a starting model is not the one that the run began with",
            where=", ".join(needed),
            expected="the same bytes, under the paths in config.toml, seen from the working directory of the run",
            next="restore it, or replay where it is",
        )
    return [
        f"{key} is {'not the file' if found else 'not there'} that the run began with"
        for key, found in changed.items()
    ]


def _other_machine(past: PastRun) -> list[str]:
    """A note where the run has last computed on another processor, whose bits may be others."""
    known, here = read_machine(past.folder), numerics.processor()
    if known is None or known["processor"] == here:
        return []
    return [
        f"the run has computed on {known['processor']}, this is {here}: the bits of both may differ"
    ]


# Where it begins
# ------------------------------------------------------------------------------------------------------


def _groups(past: PastRun, again: Again, step: int) -> list[Group]:
    """Those that the step trains on."""
    if again.learning is None:
        return []
    return [group for group in read_step(past.journal(step)) if group.outcome == "train"]


def _versions(groups: list[Group]) -> list[int]:
    """The weight versions that sampled them: to say what these gave a token, a replay must come
    by."""
    return [
        int(e.weight_versions[e.loss_mask].min())
        for group in groups
        for e in group.episodes
        if e.loss_mask.any()
    ]


def _begin(past: PastRun, again: Again, latest: int, report: Report, verdict: Verdict) -> int:
    """Bring the learners to the newest whole checkpoint up to `latest`, or leave them at the start;
    returns the steps done."""
    for path in sorted(past.checkpoints.glob("step_*"), reverse=True):
        if checkpoint_step(path) > latest:
            continue
        if damage := find_damage(path):
            report(f"checkpoint {path.name} is damaged, beginning before it: {'; '.join(damage)}")
            continue
        tensors, state = load_checkpoint(path, verify=False)
        for name, learner in again.learners.items():
            learner.model.load_weights(tensors[name])
            learner.optimizer.load_state(
                tensors[f"{name}_optimizer"], state["optimizer_steps"][name]
            )
        again.restore(state["step"], state["progress"])
        verdict.begun, done = f"checkpoint {path.name}", int(state["step"])
        break
    else:
        verdict.begun, done = "the starting weights", 0
    verdict.difference = _weights_otherwise(past, again, done, verdict)
    return done


# What is compared
# -----------------------------------------------------------------------------------------------------


def _sampled_otherwise(
    again: Again, groups: list[Group], step: int, version: int, verdict: Verdict
) -> Difference | None:
    """The first token of the groups whose recorded log-prob is not what the weights of that
    version, which are said to have sampled it, give it. Only where the run was held to that
    (P1)."""
    learning = again.learning
    if learning is None or not learning.exact:
        return None
    batch = pack_batch(groups, learning.config)
    episodes, model, sampling = batch.episodes, learning.models.policy.model, learning.sampling
    if not any((e.weight_versions == version).any() for e in episodes):
        return None
    for sample, own in enumerate(
        batch.forward_all(lambda b: batch_logprobs(model, b, sampling, entropy=False)[0])
    ):
        episode = episodes[sample]
        places = np.flatnonzero(episode.loss_mask)
        mine = episode.weight_versions[places] == version
        recorded = episode.engine_logprobs[places]
        verdict.tokens += int(mine.sum())
        for n in np.flatnonzero(mine & (own != recorded))[:1]:
            at, who = int(places[n]), f"{step}:{episode.uid}:{episode.sample_index}"
            return Difference(
                what=f"log-prob of token {at} (number {int(episode.tokens[at])}) of episode {who} under weights {version}; "
                "it, or a token before it, is not what was sampled",
                recorded=repr(float(recorded[n])),
                found=repr(float(own[n])),
            )
    return None


def _step_otherwise(
    past: PastRun,
    again: Again,
    done: int,
    verdict: Verdict,
    observe: Observe | None,
    score: bool,
    elsewhere: bool,
) -> Difference | None:
    """Learn the step after `done`; what is first found to differ, from its episodes to the weights
    after it.

    elsewhere: compare the log-probs first, as a run of another processor can differ in them, which
    would stop the update.
    """
    step, learning = done + 1, again.learning
    require_step(past, step)
    rewritten = None if learning is None else _file_otherwise(past, step)
    if learning is not None and (score or rewritten or elsewhere):
        groups, found = read_step(past.journal(step)), None
        if rewritten or elsewhere:
            found = _sampled_otherwise(
                again, [g for g in groups if g.outcome == "train"], step, done, verdict
            )
        if found is None and (score or rewritten):
            found = _scored_otherwise(learning.config, groups, step, verdict)
        if found or rewritten:
            return found or rewritten
    row = again.step(done, observe)
    return (
        _metrics_otherwise(past.metrics[step], metrics_row(step, row), verdict)
        or _state_otherwise(past, again, step)
        or _weights_otherwise(past, again, step, verdict)
        or (_checkpoint_otherwise(past, again, step, verdict) if step == verdict.step else None)
    )


def _scored_otherwise(
    config: Config, groups: list[Group], step: int, verdict: Verdict
) -> Difference | None:
    scoring = rescored(config, groups, step)
    if step == verdict.step:
        verdict.episodes = scoring.episodes
        verdict.notes += scoring.notes
    return scoring.difference


def _file_otherwise(past: PastRun, step: int) -> Difference | None:
    path = past.journal(step)
    if step not in past.ledger or not path.is_file():
        return None
    recorded, found = past.ledger[step]["episodes"], file_hash(path)
    return (
        Difference(what=f"SHA-256 of episodes/{path.name}", recorded=recorded, found=found)
        if recorded != found
        else None
    )


def _metrics_otherwise(recorded: Row, found: Row, verdict: Verdict) -> Difference | None:
    """Held-out evaluation is no part of a step, and is left out."""
    names = [
        name for name in {**recorded, **found} if not name.startswith("eval/") and name != "step"
    ]
    differing = [
        name
        for name in names
        if name not in recorded or name not in found or recorded[name] != found[name]
    ]
    if differing:
        name = differing[0]
        also = f"also {', '.join(differing[1:])}" if differing[1:] else ""
        return Difference(
            what=f"{name} of step {int(found['step'])}",
            recorded=repr(recorded.get(name, "not there")),
            found=repr(found.get(name, "not there")),
            also=also,
        )
    if found["step"] == verdict.step:
        verdict.metrics = {name: recorded[name] for name in names}
    return None


def _state_otherwise(past: PastRun, again: Again, step: int) -> Difference | None:
    """Batches drawn, running baseline and success rates, as the journal's file says that the step
    left them."""
    note = None if again.learning is None else read_note(past.journal(step))
    if note is None:
        return None
    recorded, found = note["state"], again.state()
    for name in found:
        if recorded[name] != found[name]:
            return Difference(
                what=f"{name} of the rollouts after step {step}",
                recorded=repr(recorded[name]),
                found=repr(found[name]),
            )
    return None


def _weights_otherwise(
    past: PastRun, again: Again, step: int, verdict: Verdict
) -> Difference | None:
    found = again.hash()
    if step not in past.ledger:
        return None
    recorded = past.ledger[step]["weights"]
    if recorded != found:
        what = f"weights after step {step}" if step else "starting weights"
        return Difference(what=what, recorded=recorded, found=found)
    verdict.weights = found
    return None


def _checkpoint_otherwise(
    past: PastRun, again: Again, step: int, verdict: Verdict
) -> Difference | None:
    path = past.checkpoints / step_name(step)
    if not path.is_dir():
        return None
    if damage := find_damage(path):
        verdict.notes.append(
            f"checkpoint {path.name} is damaged and not compared: {'; '.join(damage)}"
        )
        return None
    tensors, state = load_checkpoint(path, verify=False)
    for name, learner in again.learners.items():
        weights = {key: parameter.detach() for key, parameter in learner.model.trainable().items()}
        for stem, ours in ((name, weights), (f"{name}_optimizer", learner.optimizer.state())):
            if found := _tensors_otherwise(f"{path.name}/{stem}.safetensors", tensors[stem], ours):
                return found
        if state["optimizer_steps"][name] != learner.optimizer.step:
            return Difference(
                what=f"optimizer steps of the {name} in {path.name}",
                recorded=str(state["optimizer_steps"][name]),
                found=str(learner.optimizer.step),
            )
    verdict.checkpoint = f"{path.name}, {sum(map(len, tensors.values()))} tensors"
    return None


def _tensors_otherwise(
    file: str, recorded: dict[str, Tensor], found: dict[str, Tensor]
) -> Difference | None:
    for name in sorted({**recorded, **found}):
        pair = [
            tensor_hash(side[name]) if name in side else "not there" for side in (recorded, found)
        ]
        if pair[0] != pair[1]:
            return Difference(what=f"{name} in {file}", recorded=pair[0], found=pair[1])
    return None
