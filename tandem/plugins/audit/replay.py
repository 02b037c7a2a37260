"""A step of a run, learned again from the run folder, with every number compared with the record.

    checkpoints/, or the starting weights --> learners
                                                 | the steps between, learned again
    episodes/train_step_N.parquet --> groups -->  update   --> metrics, weights, optimizer
                    |                               |                  |
          rewards scored again        log-probs of its tokens    equal to metrics.jsonl,
                                                                 ledger.jsonl, checkpoints/step_N ?

Nothing is generated and nothing written: samples, and the answers of environments, tools and
judges, are read back from the journal. It does not know how a step is learned: that is
replay_run.py.

    tandem replay runs/demo --step 12
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from tandem.choices import Report, why_gap
from tandem.model.forward import batch_logprobs
from tandem.plugins.audit.replay_run import ReplayRun, open_replay_run
from tandem.plugins.audit.rescore import rescore
from tandem.run_folder.checkpoint import checkpoint_step, find_damage, load_checkpoint, step_name
from tandem.run_folder.diff import Divergence, compare, compare_items
from tandem.run_folder.episode_files import read_groups, read_note
from tandem.run_folder.folder import read_machine
from tandem.run_folder.metrics import metrics_row, read_metrics
from tandem.run_folder.read import PastRun, altered, require_step, without_evaluation
from tandem.runtime import numerics
from tandem.runtime.disk import file_hash
from tandem.trainer.batch import pack_batch
from tandem.trainer.learn import Observe
from tandem.types import Group, Row
from tandem.weights.hashing import tensor_hash

OTHER_BITS = "the bits of both may differ"
OTHER_SUMS = "updates may differ in the last bits"


@dataclass(kw_only=True)
class ReplayReport:
    """The values that a replay compared. `divergence` is the first one unlike the record, which is
    its a; None if all are equal."""

    step: int
    start: str = ""  # the weights that the replay began with
    episodes: int = 0  # scored again
    tokens: int = 0  # whose log-probs were computed again under the weights that sampled them
    metrics: Row = field(default_factory=dict)  # of the step's row, all equal
    weights: str = ""  # the hash, equal to the ledger's; empty if the ledger has none
    checkpoint: str = ""  # of the step, if it is still there and equal
    notes: list[str] = field(default_factory=list)  # parts not compared, and why
    divergence: Divergence | None = None


def replay(
    past: PastRun, step: int, report: Report, observe: Observe | None = None, *, score: bool = True
) -> ReplayReport:
    """Learn step `step` again, counted from 1 as in metrics.jsonl, and compare it with the run to
    the last bit.

    observe sees the step's updates; score: also score its episodes again. Raises UserError if a
    replay cannot begin with the folder or an input.
    """
    require_step(past, step)
    with open_replay_run(past, report) as run:
        result = ReplayReport(step=step)
        return _Replay(past, run, step, report, observe, score, result).run()


@dataclass
class _Replay:
    """One replay under way. Each `_compare_*` yields the differences; nothing is computed after the
    first one."""

    past: PastRun
    replayed: ReplayRun
    step: int
    report: Report
    observe: Observe | None
    score: bool
    result: ReplayReport

    def run(self) -> ReplayReport:
        notes, past = self.result.notes, self.past
        notes += self.replayed.notes
        machine, here = read_machine(past.folder), numerics.processor()
        if other_machine := machine is not None and machine["processor"] != here:
            before = machine["processor"] if machine else ""
            notes.append(f"the run has computed on {before}, this is {here}: {OTHER_BITS}")
        # several processes add up gradients in another order than a replay, which is one
        rows = read_metrics(past.folder, "timings.jsonl")
        counts = {int(row.get("processes", 1)) for row in rows if row["step"] <= self.step} - {1}
        if counts or past.config.parallel.mesh:
            sizes = " and ".join(map(str, sorted(counts)))
            found = f"{sizes} processes" if counts else "a mesh"
            notes.append(f"the run has trained with {found}, this is one: {OTHER_SUMS}")
        self.result.divergence = next(self._compare(other_machine), None)
        # files and rows up to this step, evaluations included, have the ledger's hashes
        changed = altered(past.folder, self.step)
        notes += [f"not as it was written: {one}" for one in changed]
        for one in changed:
            if one.step == self.step and one.found and self.result.divergence is None:
                what = f"SHA-256 of {one.what}"
                self.result.divergence = Divergence(what=what, a=one.recorded, b=one.found)
        return self.result

    def _compare(self, other_machine: bool) -> Iterator[Divergence]:
        """Compare everything from the starting point to the weights after the step."""
        groups = []
        if self.replayed.learning is not None:
            groups = _trained(read_groups(self.past.journal(self.step)))
        # a replay must pass each version of the weights that sampled a token, to compare log-probs
        episodes = [episode for group in groups for episode in group.episodes]
        oldest = [e.weight_versions[e.loss_mask].min() for e in episodes if e.loss_mask.any()]
        first = self._load_start(min([self.step - 1, *map(int, oldest)]))
        yield from self._compare_weights(first)
        for done in range(first, self.step):
            yield from self._compare_logprobs(groups, self.step, version=done)
            yield from self._compare_step(done, other_machine)

    def _load_start(self, latest: int) -> int:
        """Load the newest whole checkpoint up to `latest`, or stay at the starting weights; return
        the steps done."""
        for path in sorted(self.past.checkpoints.glob("step_*"), reverse=True):
            if checkpoint_step(path) > latest:
                continue
            if damage := find_damage(path):
                text = f"checkpoint {path.name} is damaged, beginning before it: "
                self.report(text + "; ".join(damage))
                continue
            tensors, state = load_checkpoint(path, verify=False)
            for name, learner in self.replayed.learners.items():
                moments = tensors[f"{name}_optimizer"]
                learner.load(tensors[name], moments, state["optimizer_steps"][name])
            self.replayed.restore(state["step"], state["progress"])
            self.result.start = f"checkpoint {path.name}"
            return int(state["step"])
        self.result.start = "the starting weights"
        return 0

    def _compare_step(self, done: int, other_machine: bool) -> Iterator[Divergence]:
        """Learn the step after `done` and compare it, from its episodes to the weights after it.

        other_machine: compare the log-probs first, as another processor can give others, which
        would stop the update.
        """
        step, last = done + 1, done + 1 == self.step
        require_step(self.past, step)
        if self.replayed.learning is not None:
            groups = read_groups(self.past.journal(step))
            path, rewritten = self.past.journal(step), None
            if step in self.past.ledger:
                recorded = self.past.ledger[step]["episodes"]
                what = f"SHA-256 of episodes/{path.name}"
                rewritten = next(compare(what, recorded, file_hash(path)), None)
            if not last and (rewritten or other_machine):
                yield from self._compare_logprobs(_trained(groups), step, version=done)
            if rewritten or (last and self.score):
                episodes, notes, divergence = rescore(self.past.config, groups, step)
                if last:
                    self.result.episodes = episodes
                    self.result.notes += notes
                if divergence is not None:
                    yield divergence
            if rewritten:  # and nothing in it was found wrong
                yield rewritten
        row = metrics_row(step, self.replayed.step(done, self.observe if last else None))
        yield from self._compare_metrics(step, row)
        yield from self._compare_rollout_state(step)
        yield from self._compare_weights(step)
        if last:
            yield from self._compare_checkpoint(step)

    def _compare_logprobs(
        self, groups: Sequence[Group], step: int, version: int
    ) -> Iterator[Divergence]:
        """Compute the log-probs of the tokens of step `step` that weights `version` are recorded to
        have sampled, with the weights now. They must be equal if the run required it (P1); of an
        engine of other kernels the gap is noted."""
        learning = self.replayed.learning
        if learning is None:
            return
        where = why_gap(learning.config, learning.models.policy.model.gap)
        if not (learning.parity.exact or where):
            return
        batch = pack_batch(groups, learning.config)
        episodes, model = batch.episodes, learning.models.policy.model
        if not any((episode.weight_versions == version).any() for episode in episodes):
            return
        logprobs = batch.forward_all(
            model, lambda part: batch_logprobs(model, part, learning.sampling, entropy=False)[0]
        )
        gaps = []
        for episode, computed in zip(episodes, logprobs, strict=True):
            places = np.flatnonzero(episode.loss_mask)
            of_version = episode.weight_versions[places] == version
            recorded = episode.engine_logprobs[places]
            if not learning.parity.exact:
                gaps.append(np.abs(computed - recorded)[of_version])
                continue
            self.result.tokens += int(of_version.sum())
            for n in np.flatnonzero(of_version & (computed != recorded))[:1]:
                place, name = int(places[n]), f"{step}:{episode.uid}:{episode.sample_index}"
                yield Divergence(
                    what=f"log-prob of token {place} (number {int(episode.tokens[place])}) "
                    f"of episode {name} under weights {version}; "
                    "it, or a token before it, is not what was sampled",
                    a=repr(float(recorded[n])),
                    b=repr(float(computed[n])),
                )
        if gaps:
            gap = np.concatenate(gaps)
            self.result.notes.append(
                f"log-probs of step {step} under weights {version} are not compared bit by bit "
                f"({where}): {len(gap)} tokens differ by {gap.mean():.2g} nats in the mean, "
                f"{gap.max():.2g} at most"
            )

    def _compare_metrics(self, step: int, row: Row) -> Iterator[Divergence]:
        recorded = without_evaluation(self.past.metrics[step])
        differences = list(compare_items(recorded, without_evaluation(row)))
        if differences:
            names = [one.what for one in differences]
            also = f"also {', '.join(names[1:])}" if names[1:] else ""
            yield replace(differences[0], what=f"{names[0]} of step {step}", also=also)
        if step == self.step:
            self.result.metrics = recorded

    def _compare_rollout_state(self, step: int) -> Iterator[Divergence]:
        """Compare batches drawn, running baseline and success rates with the note in the journal's
        file."""
        note = None if self.replayed.learning is None else read_note(self.past.journal(step))
        if note is not None:
            computed = self.replayed.rollout_state()
            recorded = {name: note["state"][name] for name in computed}
            yield from compare_items(recorded, computed, f"{{}} of the rollouts after step {step}")

    def _compare_weights(self, step: int) -> Iterator[Divergence]:
        if step in self.past.ledger:
            recorded, computed = self.past.ledger[step]["weights"], self.replayed.weight_hash()
            what = f"weights after step {step}" if step else "starting weights"
            yield from compare(what, recorded, computed)
            self.result.weights = computed

    def _compare_checkpoint(self, step: int) -> Iterator[Divergence]:
        """Compare every tensor of weights and optimizers, if the checkpoint is still there."""
        path = self.past.checkpoints / step_name(step)
        if not path.is_dir():
            return
        if damage := find_damage(path):
            text = f"checkpoint {path.name} is damaged and not compared: {'; '.join(damage)}"
            self.result.notes.append(text)
            return
        tensors, state = load_checkpoint(path, verify=False)
        for name, learner in self.replayed.learners.items():
            optimizer = learner.optimizer
            files = (name, optimizer.weights()), (f"{name}_optimizer", optimizer.state())
            for stem, computed in files:
                what = f"{{}} in {path.name}/{stem}.safetensors"
                yield from compare_items(_hashes(tensors[stem]), _hashes(computed), what)
            what = f"optimizer steps of the {name} in {path.name}"
            yield from compare(what, state["optimizer_steps"][name], optimizer.step)
        self.result.checkpoint = f"{path.name}, {sum(map(len, tensors.values()))} tensors"


def _trained(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.outcome == "train"]


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_hash(tensors[name]) for name in sorted(tensors)}
