"""The answers of `tandem view` over a real run: equal to what its files say."""

import json
import re
import shutil
import threading
import time
from dataclasses import replace

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tandem.plugins.view.episodes import EpisodeTable
from tandem.plugins.view.runs import thin
from tandem.run_folder.episode_files import json_lines, read_episodes, read_groups, write_episodes
from tandem.run_folder.metrics import read_metrics
from tests.support.past_runs import STEPS, copy_of, past_run, rewrite
from tests.support.viewing import add_step, group, keep_image, make_run, viewing
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A folder with a real run of four steps, and one with made-up texts."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(past_run("train"), root / "demo" / "train")
    made = make_run(root / "made", steps=3, rl={"advantage": "grpo_no_std"})
    for step in (1, 2, 3):
        groups = [
            group(f"p/{step}", ["Answer: 7", "answer: 8 <b>"], [1.0, 0.0], prompt="What is 3 + 4?"),
            group("q", ["ÄPFEL", ""], [0.5, 0.5], prompt=f"Äpfel {step}?", outcome="no_signal"),
        ]
        add_step(made, step, groups, reward=0.5 + step, step_s=1.5)
    with viewing(root) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.root = root
        yield client


def get(server, name, *pairs, status=200, **params):
    answer = server.get(f"/api/{name}", params=[*pairs, *params.items()])
    assert answer.status_code == status, answer.text
    return answer.json()


def test_runs_are_listed_with_their_last_figures(server):
    runs = {run["name"]: run for run in get(server, "runs")["runs"]}
    rows = read_metrics(server.root / "demo" / "train")
    one = runs["demo/train"]
    assert runs.keys() == {"demo/train", "made"}
    assert (one["state"], one["step"], one["steps"]) == ("finished", STEPS, STEPS)
    ends = [rows[0]["eval/sampled"], rows[-1]["eval/sampled"]]
    assert one["reward"] == rows[-1]["reward"] and [one["held_out_first"], one["held_out"]] == ends
    assert one["errors"] == 0 and one["step_s"] > 0 and one["created"] <= one["written"]
    newest = max((server.root / "demo/train/checkpoints").glob("*/policy.safetensors"))
    assert one["size"] == sum(values.size for values in load_file(newest).values()) > 0
    assert (one["command"], one["algorithm"], runs["made"]["size"]) == ("train", "grpo", 0)


def test_images_are_those_of_the_run_and_no_other_file(tmp_path):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    name = keep_image(run)
    seen = [{"type": "image", "image": name}, {"type": "text", "text": " what?"}]
    add_step(run, 1, [group("seen", ["a square"], [1.0], prompt=seen)], reward=1.0)
    (run / "images" / ("b" * 11)).write_text("<svg onload='hit()'/>")
    with viewing(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as server:
        [message, said] = get(server, "episode", run="run", step=1, row=0)["conversation"]
        assert message["images"] == [name] and message["text"] == "[image] what?"
        assert "images" not in said
        [row] = get(server, "episodes", run="run")["rows"]
        assert row["prompt"] == "[image] what?"
        answer = server.get("/api/image", params={"run": "run", "name": name})
        assert answer.content == (run / "images" / name).read_bytes()
        assert answer.headers["content-type"] == "image/png"
        for wrong in ("a" * 11, "b" * 11, "../config.toml", f"../images/{name}", ""):
            get(server, "image", ("name", wrong), run="run", status=404)
        get(server, "image", ("name", name), run=other.name, status=404)


def test_series_are_the_rows_of_the_files(server):
    run = server.root / "demo" / "train"
    asked = [("key", "reward"), ("key", "eval/sampled"), ("key", "timings/learn_s")]
    found = get(server, "series", *asked, run="demo/train")["demo/train"]
    rows, times = read_metrics(run), read_metrics(run, "timings.jsonl")
    for key, source in (("reward", rows), ("eval/sampled", rows), ("timings/learn_s", times)):
        plain = key.removeprefix("timings/")
        having = [row for row in source if plain in row]
        series = found["series"][key]
        assert series["x"] == [row["step"] for row in having] and len(having) >= 2
        assert series["y"] == [row[plain] for row in having]
    zoomed = get(server, "series", ("key", "reward"), ("from", "2"), ("to", "3"), run="demo/train")
    assert zoomed["demo/train"]["series"]["reward"]["x"] == [2, 3]


def test_thinning_keeps_ends_and_extremes():
    values = np.sin(np.arange(100_003) / 5000)
    values[77_777], values[12_345] = 9.0, -9.0
    places = thin(values, 1000)
    assert len(places) <= 1002 and (np.diff(places) > 0).all()
    assert {0, 77_777, 12_345, 100_002} <= set(places.tolist())
    assert thin(values[:900], 1000).tolist() == list(range(900))


def all_episodes(run):
    """Every episode of the files, as plain Python has it, in the table's order."""
    found = []
    for path in run.glob("episodes/*.parquet"):
        kind, _, step = path.stem.partition("_step_")
        for row, one in enumerate(pq.read_table(path).to_pylist()):
            found.append(one | {"kind": kind, "row": row, "step": int(step)})
    return found


QUERIES = [
    ({}, lambda e: True),
    ({"q": "ANSWER: 7"}, lambda e: "answer: 7" in e["text"].lower()),
    (
        {"q": "äpfel"},
        lambda e: "äpfel" in (e["text"] + json.loads(e["messages"])[0]["content"]).lower(),
    ),
    ({"q": "p/2"}, lambda e: "p/2" in e["uid"]),
    ({"q": "<b>"}, lambda e: "<b>" in e["text"]),
    ({"q": "nothing like it"}, lambda e: False),
    ({"outcome": "no_signal"}, lambda e: e["outcome"] == "no_signal"),
    (
        {"kind": "train", "step_from": "2", "step_to": "2"},
        lambda e: e["step"] == 2 and e["kind"] == "train",
    ),
    ({"reward_from": "0.4", "reward_to": "0.6"}, lambda e: 0.4 <= e["reward"] <= 0.6),
    ({"uid": "q", "q": "pfel 3"}, lambda e: e["uid"] == "q" and "pfel 3" in e["messages"]),
    ({"stop": "length"}, lambda e: e["stop_reason"] == "length"),
    ({"errors": "1"}, lambda e: bool(e["env_error"] or e["reward_error"])),
]


@pytest.mark.parametrize("run", ["demo/train", "made"])
@pytest.mark.parametrize(("query", "wanted"), QUERIES)
def test_search_and_filters_equal_plain_python(server, run, query, wanted):
    episodes = all_episodes(server.root / run)
    having = [e for e in episodes if wanted(e)]
    for sort, key in (("-step", lambda e: -e["step"]), ("reward", lambda e: e["reward"])):
        eventually(lambda: get(server, "episodes", run=run)["complete"])
        found = get(server, "episodes", run=run, sort=sort, limit=500, **query)
        shown = [(e["kind"], e["step"], e["row"]) for e in found["rows"]]
        assert set(shown) == {(e["kind"], e["step"], e["row"]) for e in having}
        assert found["count"] == len(shown) == len(having) and found["total"] == len(episodes)
        by_place = {(e["kind"], e["step"], e["row"]): e for e in having}
        assert [key(by_place[place]) for place in shown] == sorted(map(key, having))
    if having:
        assert found["mean"] == pytest.approx(np.mean([e["reward"] for e in having]))


def test_export_has_the_lines_of_the_journal(server, tmp_path):
    query = {"run": "made", "q": "answer: 8"}
    lines = server.get("/api/export", params=query).content.splitlines(keepends=True)
    files = sorted((server.root / "made" / "episodes").glob("*.parquet"))
    assert lines == [line for path in files for line in json_lines(path) if b"answer: 8" in line]
    assert len(lines) == 3
    answer = server.get("/api/export", params={**query, "format": "parquet"})
    assert 'filename="made-episodes.parquet"' in answer.headers["content-disposition"]
    (tmp_path / "some.parquet").write_bytes(answer.content)
    groups = read_groups(tmp_path / "some.parquet")
    assert [e.text for g in groups for e in g.episodes] == ["answer: 8 <b>"] * 3


def test_exported_episodes_keep_what_only_some_files_have(tmp_path):
    experts = np.arange(24, dtype=np.int16).reshape(12, 2, 1)
    for step, fields in enumerate(({"starts": (6,)}, {}, {"experts": experts})):
        write_episodes(tmp_path, step, [group("p", ["Answer: 7"], [1.0], **fields)])
    EpisodeTable(tmp_path).export_parquet({}, tmp_path / "all.parquet")
    first, second, third = read_episodes(tmp_path / "all.parquet")
    assert [one.starts for one in (first, second, third)] == [(6,), (), ()]
    assert np.array_equal(third.experts, experts) and not second.experts.size


def test_one_episode_has_its_tokens_group_and_reward(server):
    found = get(server, "episode", run="demo/train", kind="train", step=3, row=5)
    episodes = all_episodes(server.root / "demo" / "train")
    one = [e for e in episodes if (e["kind"], e["step"]) == ("train", 3)][5]
    assert found["tokens"]["id"] == one["tokens"] and found["tokens"]["sampled"] == one["loss_mask"]
    assert found["tokens"]["logprob"] == one["engine_logprobs"]
    sampled = [t for t, own in zip(found["tokens"]["text"], one["loss_mask"], strict=True) if own]
    assert re.sub(r"<\|\w+\|>", "", "".join(sampled)) == one["text"] != ""
    said = {"role": "assistant", "content": one["text"], "text": one["text"]}
    assert found["conversation"][-1] == said | {"calls": [], "sampled": True}
    assert found["key"] == str(one["key"]) and found["reward"] == one["reward"]
    rewards = [peer["reward"] for peer in found["peers"]]
    advantage = one["reward"] - np.mean(rewards)
    assert len(rewards) == 4 and found["advantage"] == pytest.approx(advantage)


def test_what_why_found_out_is_shown_beside_the_tokens(server):
    first = get(server, "episode", run="made", kind="train", step=1, row=0)
    assert "ratio" not in first["tokens"]
    learned = [{"ratio": 1.0 + n, "advantage": 7.0} for n in range(len(first["tokens"]["id"]))]
    why = server.root / "made" / "why" / f"{first['key']}.json"
    why.parent.mkdir()
    why.write_text(json.dumps({"tokens": learned}))
    second = get(server, "episode", run="made", kind="train", step=1, row=0)["tokens"]
    assert second["ratio"] == [row["ratio"] for row in learned]
    assert set(second["advantage"]) == {7.0} != {first["advantage"]}  # of the update, not the group


def test_a_step_says_what_it_trained_on_and_what_was_left_out(server):
    found = get(server, "step", run="made", step=2)
    assert {g["uid"]: g["outcome"] for g in found["groups"]} == {"p/2": "train", "q": "no_signal"}
    assert [a["reward"] for a in found["groups"][0]["attempts"]] == [1.0, 0.0]
    assert found["numbers"] == {"reward": 2.5, "timings/step_s": 1.5}
    assert "teach nothing" in found["outcomes"]["no_signal"]
    sampled = get(server, "step", run="demo/train", step=3)["versions"]
    masks = [e["loss_mask"] for e in all_episodes(server.root / "demo/train") if e["step"] == 3]
    assert sampled == {"2": sum(map(sum, masks))}


def test_diff_names_the_first_difference(server, tmp_path):
    other = copy_of(past_run("train"), tmp_path)
    rewrite(other, 2, lambda row, place, e: e if row or place else replace(e, reward=9.0))
    shutil.copytree(other, server.root / "demo" / "other")
    found = get(server, "diff", ("run", "demo/train"), ("run", "demo/other"))
    assert found["step"] == 2 and found["divergence"]["what"].endswith("reward")
    assert found["divergence"]["b"] == "9.0"
    differing = get(server, "config", ("run", "demo/train"), ("run", "made"))["different"]
    assert "rl.group_size" in differing and "rl.seed" not in differing
    shutil.rmtree(server.root / "demo" / "other")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/episodes?run=../made", 404),
        ("/api/step?run=made&step=99", 404),
        ("/api/episode?run=made&kind=train&step=1&row=99", 404),
        ("/api/episode?run=made&kind=../x&step=1&row=0", 400),
        ("/api/episodes?run=made&sort=tokens;drop", 400),
        ("/api/step?run=made&step=one", 400),
        ("/api/step?run=made", 400),
        ("/api/episode?run=made&kind=train&step=1", 400),
        ("/api/export?run=made&format=csv", 400),
        (f"/api/step?run=made&step={10**30}", 404),
        ("/api/diff?run=made", 400),
        ("/api/export?run=nothing", 404),
        ("/..%2f..%2fapp.py", 404),
        ("/../app.py", 404),
    ],
)
def test_a_wrong_address_is_a_short_answer(server, path, status):
    answer = server.get(path)
    assert answer.status_code == status
    assert len(answer.text) < 300 and "Traceback" not in answer.text


def test_damaged_and_half_written_files_break_nothing(tmp_path):
    run = make_run(tmp_path / "run")
    for step in (1, 2):
        add_step(run, step, [group("a", ["one", "two"], [1.0, 0.0])], reward=float(step))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('not a row\n{"step": 1, "reward": 7}\n{"reward": 3}\n[1]\n{"step": 3, "rewa')
    (run / "timings.jsonl").write_bytes(b"\xff\xfe\n")
    (run / "status.json").write_text("{")
    half = (run / "episodes/train_step_000001.parquet").read_bytes()[:900]
    (run / "episodes/train_step_000003.parquet").write_bytes(half)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.toml").write_text("= = =")
    (tmp_path / "broken/run.json").write_text("[]")
    with viewing(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as client:
        runs = {run["name"]: run for run in get(client, "runs")["runs"]}
        assert runs["run"]["broken"] == 5 and runs["run"]["reward"] == 2.0
        assert runs["broken"]["step"] is None
        found = get(client, "episodes", run="run")
        assert found["count"] == 4 and list(found["damaged"]) == ["train_step_000003.parquet"]
        series = get(client, "series", run="run", key="reward")["run"]["series"]
        assert series["reward"]["x"] == [1, 2]
        answer = get(client, "episode", run="run", kind="train", step=3, row=0, status=422)
        assert "cannot be read" in answer["error"]
        half = get(client, "step", run="run", step=3)
        assert "cannot be read" in half["damaged"] and half["groups"] == []


def test_news_of_a_run_come_within_a_second(tmp_path):
    run, heard = make_run(tmp_path / "run", steps=9), []
    with viewing(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as client:
        done = threading.Event()

        def listen():
            with client.stream("GET", "/api/events") as events:
                for line in events.iter_lines():
                    if line.startswith("data: "):
                        heard.append((time.monotonic(), json.loads(line[6:])["runs"]))
                    if len(heard) == 2:
                        break
            done.set()

        thread = threading.Thread(target=listen)
        thread.start()
        assert eventually(lambda: heard)  # that it listens
        written = time.monotonic()
        add_step(run, 1, [group("a", ["one"], [1.0])], reward=0.25)
        assert done.wait(60)
        thread.join()
        assert heard[1][1] == ["run"] and heard[1][0] - written < 1.0
        assert get(client, "runs")["runs"][0]["step"] == 1
        assert get(client, "episodes", run="run")["count"] == 1
        add_step(run, 2, reward=0.5)
        assert get(client, "runs")["runs"][0]["step"] == 2
