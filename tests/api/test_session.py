"""An algorithm over the engine by four calls: its log-probs are the trainer's, and where it does
what `tandem train` does it reaches the same weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tandem
from examples import grpo_in_one_file, own_algorithm, self_play
from tandem.api.session import ARRAYS
from tandem.plugins.tasks.arithmetic import TASK
from tandem.runtime.disk import write_rows
from tandem.weights.hashing import weight_hash
from tests.support.command import tandem as command

ROWS = TASK.rows("train", 16, 0, 1)
PROMPTS = ["1+1=?", [{"role": "user", "content": "2+2=?"}], "4+4=?"]  # of equal lengths


@pytest.fixture(scope="module")
def model(home):
    return home / "model"


def weights(session):
    return weight_hash(session.learner.model.merged())


def test_grpo_in_one_file_reaches_the_weights_of_train(model, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_in_one_file, "PROBLEMS", 2)
    monkeypatch.setattr(grpo_in_one_file, "GROUP", 3)
    session = grpo_in_one_file.train(model, ROWS, steps=2)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    recipe, run = tmp_path / "dr_grpo.toml", tmp_path / "run"
    recipe.write_text('rl = { algorithm = "dr_grpo", prompts_per_step = 2, group_size = 3 }')
    own = ["run.steps=2", "data.train=rows.jsonl", "data.shuffle=false", f"model.path={model}"]
    own += [f"reward.function={grpo_in_one_file.__file__}:score", "train.schedule=constant"]
    own.append(f"rollout.max_new_tokens={grpo_in_one_file.MAX_TOKENS}")
    own.append(f"train.learning_rate={grpo_in_one_file.LEARNING_RATE}")
    code, _, errors = command("train", recipe, f"run.folder={run}", *own, cwd=tmp_path)
    assert code == 0, errors
    assert f"weights {weights(session)[:16]}" in (run / "log.txt").read_text()


def test_sampled_logprobs_are_the_trainers_and_draws_have_an_address(model, monkeypatch):
    monkeypatch.setattr("tandem.run_folder.folder.bfloat16_unit", lambda: "pairs")
    monkeypatch.setattr("tandem.model.probe.auto_dtype", None)  # a session tries no type
    session = tandem.Session(model, max_new_tokens=6, temperature=0.7, top_k=20)
    assert session.exact
    groups = session.sample(PROMPTS, n=3)
    data = [session.datum(one) for group in groups for one in group]
    for found, datum in zip(session.logprobs(data), data, strict=True):
        assert np.array_equal(found, datum.logprobs[datum.weights != 0])
    again = tandem.Session(model, max_new_tokens=6, temperature=0.7, top_k=20)
    texts = [[one.text for one in group] for group in groups]
    assert [[one.text for one in group] for group in again.sample(PROMPTS, n=3)] == texts
    assert [[one.text for one in group] for group in again.sample(PROMPTS, n=3)] != texts


def test_a_saved_session_goes_on_as_if_never_stopped(model, tmp_path, capsys):
    straight = own_algorithm.train(model, tmp_path / "straight", steps=3, n=4)
    own_algorithm.train(model, tmp_path / "stopped", steps=2, n=4)
    stopped = own_algorithm.train(model, tmp_path / "stopped", steps=3, n=4)
    assert weights(straight) == weights(stopped)
    assert capsys.readouterr().out.count("step 3/3") == 2
    assert [stopped.save(tmp_path / folder) for folder in ("best", "stopped", "best")]
    with pytest.raises(tandem.UserError, match="another session's saves"):
        straight.save(tmp_path / "stopped")
    assert weights(tandem.Session(stopped.export(tmp_path / "hf"))) == weights(stopped)


def test_gradients_add_up_until_a_step_and_two_sessions_are_apart(model):
    first, second = self_play.train(model, steps=1)
    assert weights(first) != weights(second)
    data = [second.datum(one) for one in second.sample(["a"], n=2)[0]]
    before = weights(second)
    second.forward_backward(data)
    one = [p.grad.clone() for p in second.learner.optimizer.parameters.values()]
    second.forward_backward(data)
    for p, grad in zip(second.learner.optimizer.parameters.values(), one, strict=True):
        assert torch.equal(p.grad, 2 * grad)
    assert weights(second) == before
    assert second.optim_step(learning_rate=0.0)["learning_rate"] == 0.0
    assert weights(second) == before


def no_loss(policy_logprobs):
    return -policy_logprobs.detach(), {}


def test_mistakes_are_named_and_change_nothing(model, tmp_path):
    session = tandem.Session(model, max_new_tokens=2)
    (folder := tmp_path / "mine").mkdir()
    (folder / "notes.txt").write_text("kept")
    [sampled] = session.sample(["a"])[0]
    data, train = [session.datum(sampled)], session.forward_backward
    assert session.sample(["a"], stop=["b"])[0][0].stop_reason  # a list of texts is taken
    bare = session.forward(data, lambda policy_logprobs: -policy_logprobs)
    assert bare == session.forward(data, "cross_entropy")
    before, chat = weights(session), [{"role": "user", "content": "a"}]
    for call, error in [
        (lambda: tandem.Session(model, kl_coef=0.1), r"rl\.kl_coef"),
        *[(lambda p=p: session.sample(p), "a list of prompts") for p in ("a", chat)],
        (lambda: session.sample(["a"], 0), "a list of prompts"),
        (lambda: session.sample(["a", "b"], uids=["a"]), "a uid of each prompt"),
        *[(lambda p=p: session.sample([p]), "no prompt") for p in (5, None, [1.5])],
        (lambda: session.sample(["a"], temprature=0.5), "temprature"),
        (lambda: session.datum([sampled]), "a completion of"),
        (lambda: session.datum(sampled, advantage="much"), "much"),
        (lambda: train([session.datum(sampled, weight=np.inf)]), r"data\[0\]"),
        (lambda: train(data, "pposs"), "cross_entropy, importance_sampling, ppo_clip"),
        (lambda: train(data, None), "no such loss"),
        (lambda: train(data, "ppo_clip", clip_hihg=0.3), "no setting 'clip_hihg'"),
        (lambda: train(data, lambda policy_logprobs: None), "NoneType None"),
        (lambda: train(data, lambda policy_logprobs: -policy_logprobs.sum()), r"Tensor \[2\]"),
        (lambda: train(data, "ppo_clip", advantages=1.0), "no setting 'advantages'"),
        (lambda: train(data, no_loss), "without a gradient"),
        (lambda: train(data, lambda policy_logprobs: policy_logprobs / 0), "not finite"),
        (lambda: session.optim_step("1e-3"), "learning_rate"),
        (lambda: session.export(folder), "the target of the export exists"),
        (lambda: session.load(session.save(tmp_path / "saves").parent), "a folder of saves"),
    ]:
        with pytest.raises(tandem.UserError, match=error):
            call()
    session.optim_step()
    assert session.export(session.export(tmp_path / "out"))  # an older export is replaced
    assert weights(session) == before and [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_a_datum_that_cannot_be_trained_is_named_and_int32_is_read(model):
    session = tandem.Session(model, max_new_tokens=2)
    one = session.datum(sampled := session.sample(["a"])[0][0])
    assert session.forward([replace(one, tokens=np.int32(one.tokens))]) == session.forward([one])
    arrays = {name: getattr(one, name) for name in ("tokens", *ARRAYS)}
    bad = [{"tokens": tokens} for tokens in (one.tokens + 999, -one.tokens, one.tokens / 2)]
    bad += [{"weights": one.weights + 1}, {"logprobs": one.logprobs[:2]}, {"prefix": 99}]
    bad += [{name: of.repeat(999) for name, of in arrays.items()}]
    bad += [{name: of[:size] for name, of in arrays.items()} | {"prefix": 0} for size in (0, 1)]
    for mistake in (sampled, *(replace(one, **fields) for fields in bad)):
        with pytest.raises(tandem.UserError, match=r"where: +data\[1\]"):
            session.forward_backward([one, mistake])
