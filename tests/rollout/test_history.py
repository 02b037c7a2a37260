"""rollout.history = "template": each turn has the prompt that the chat template writes, and is
trained behind it."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from tandem.data.chat_template import with_calls_read
from tandem.plugins.audit.replay import replay
from tandem.plugins.audit.why import find_episodes, tokens, trace_updates, with_history
from tandem.run_folder.episode_files import json_lines, read_groups
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past
from tandem.trainer.batch import pack_batch, token_weights
from tandem.trainer.learn import token_advantages
from tandem.types import Group
from tests.support.episodes import sampled_groups, settings
from tests.support.past_runs import STEPS, past_run
from tests.support.tiny import exact_model


def test_each_turn_is_trained_behind_the_prompt_that_the_template_writes():
    run, dropped = past_run("rendered turns"), 0
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for step in range(1, STEPS + 1):
        for group in read_groups(run / f"episodes/train_step_{step:06d}.parquet"):
            for episode in group.episodes:
                chat = [*episode.opening, *episode.messages]
                turns = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
                assert len(turns) == len(episode.sequences) == len(episode.starts) + 1
                for sequence, turn in zip(episode.sequences, turns, strict=True):
                    prompt = tokenizer.apply_chat_template(
                        chat[:turn], add_generation_prompt=True, return_dict=False
                    )
                    read = int(sequence.loss_mask.argmax())
                    assert sequence.tokens[:read].tolist() == prompt
                    assert sequence.loss_mask[read:].all()
                    said = "".join(message["content"] for message in chat[:turn])
                    dropped += "</think>" in said and "</think>" not in tokenizer.decode(prompt)
    assert dropped
    rows = [row for row in read_metrics(run) if "logprob_gap" in row]
    assert len(rows) == STEPS - 1 and {row["logprob_gap"] for row in rows} == {0.0}
    assert "rollout.history = template" in (run / "log.txt").read_text()


def test_a_run_of_rendered_turns_is_replayed_and_explained():
    past = open_past(past_run("rendered turns"))
    found = replay(past, 3, lambda text: None)
    assert found.divergence is None and found.tokens > 100
    episodes = [e for group in read_groups(past.journal(3)) for e in group.episodes]
    episode = next(e for e in episodes if len(e.starts) == 2)
    [ref] = find_episodes(past, f"3:{episode.uid}:{episode.sample_index}")
    update = trace_updates(past, with_history(past, ref), lambda text: None)
    rows = [row for row in tokens(past, ref, update) if row.sampled]
    assert [row.token for row in rows] == episode.tokens[episode.loss_mask].tolist()
    assert all(row.advantage is not None and row.weight > 0 for row in rows)
    assert any(b'"starts": [' in line for line in json_lines(past.journal(3)))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "ppo", "reinforce_pp"])
def test_turns_apart_have_the_advantages_and_weights_of_their_episode(algorithm):
    config = settings(algorithm=algorithm, max_gen_batches=0, kl_coef=0.0)
    whole = sampled_groups(exact_model("qwen3"), turns=3)
    apart = [Group(problem=g.problem, episodes=tuple(map(divided, g.episodes))) for g in whole]
    rng, found = np.random.default_rng(0), []
    one, other = (pack_batch(groups, config) for groups in (whole, apart))
    assert len(other.engine) == 3 * len(one.engine)
    one.values = [rng.normal(size=len(a)).astype(np.float32) for a in one.engine]
    lengths = np.cumsum([len(a) for a in other.engine])[:-1]
    other.values = np.split(np.concatenate(one.values), lengths)
    for batch in (one, other):
        advantages, returns = token_advantages(batch, config, 0.0)
        weights = {}
        for minibatch in batch.minibatches:
            weights |= token_weights(batch, minibatch, config)
        columns = advantages, returns or advantages, [weights[n] for n in sorted(weights)]
        found.append([np.concatenate(column).tolist() for column in columns])
    assert found[0] == found[1]


def divided(episode):
    """Cut before each turn but the first, with nothing of the first prompt before it."""
    own = np.flatnonzero(episode.loss_mask)
    ends = own[np.flatnonzero(np.diff(own) > 1)] + 1
    return replace(episode, starts=tuple(ends.tolist()))


def test_calls_in_texts_reach_the_template_as_calls():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    result = {"role": "tool", "name": "add", "content": "2"}
    chat = [{"role": "assistant", "content": text}, result, {"role": "assistant", "content": "2"}]
    said, answered, last = with_calls_read(chat, [tool])
    [call] = said["tool_calls"]
    assert said["content"] == "So:" and call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert answered == {**result, "tool_call_id": call["id"]} and last == chat[2]
    assert with_calls_read(chat, []) == chat
