"""The pages in headless Chromium: hostile texts, a run under way, the keyboard, a narrow screen."""

import json
import subprocess
import sys
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest

from tandem.run_folder.episode_files import write_episodes
from tests.support.browser import browser, missing
from tests.support.home import make_home
from tests.support.viewing import add_step, group, keep_image, make_run, viewing
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"{missing()} on this machine")

BIDI, CONTROL = "abc\u202edef\u2066", "bell\x07 null\x00 esc\x1b[31m \u200b"
HOSTILE = [
    "<script>window.hit = 1; fetch('http://198.51.100.1/')</script>",
    "<img src=x onerror='window.hit = 1'><svg onload='window.hit = 1'><a href='javascript:window.hit=1'>x</a>",
    "![x](http://198.51.100.1/x.png) [y](javascript:alert(1)) `code` **bold** <style>*{display:none}</style>",
    f"{BIDI} {CONTROL} ]]>--></pre></textarea><iframe srcdoc='<script>parent.hit=1</script>'>",
]
CALL = {"name": HOSTILE[0], "arguments": {HOSTILE[1]: HOSTILE[3], "n": [1, {"b": HOSTILE[1]}]}}
NAME = "<b onclick=alert(1)>&amp;"
ROWS = "document.querySelectorAll('[data-row]').length"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(a browser, the address, the run's folder)"""
    root = tmp_path_factory.mktemp("runs")
    run = make_run(root / NAME, steps=5)
    for step in (1, 2):
        groups = [
            group(HOSTILE[0], HOSTILE, [1.0, 0.0, 0.5, 0.25], prompt=HOSTILE[1]),
            group("plain", ["one", "two"], [1.0, 0.0], outcome="no_signal", env_error=HOSTILE[0]),
        ]
        add_step(run, step, groups, reward=step / 2, entropy=1.0, step_s=2.0, learn_s=1.0)
    tools = make_run(
        root / "tools/run",
        env={"name": "tools", "options": {"tools": "calculator"}},
        reward={"function": "env"},
    )
    turns = (
        {"role": "assistant", "content": f"So.<tool_call>{json.dumps(CALL)}</tool_call>"},
        {"role": "tool", "name": HOSTILE[0], "content": HOSTILE[1]},
    )
    add_step(tools, 1, [group("a", ["x"], [1.0], messages=turns)], reward=1.0)
    part = {"type": "image", "image": keep_image(tools)}
    add_step(tools, 2, [group("b", ["x"], [1.0], prompt=[part])], reward=1.0)
    with viewing(root) as url, browser() as page:
        page.open(url)
        page.until(f"return {ROWS} === 2")
        yield page, url, run


def visit(opened, path, ready):
    page, url, run = opened
    # the address may be the one that is open, and the same one again opens nothing
    page.run("location.hash = '#/away'; document.getElementById('main').replaceChildren()")
    name = page.run(f"return encodeURIComponent({run.name!r})")
    page.open(f"{url}/#/{path.replace('RUN', name)}")
    page.until(f"return {ready}")
    return page


def words_of(page, query):
    texts = f"[...document.querySelectorAll('{query}')].map(e => e.textContent)"
    return page.run(f"return {texts}")


TOOLS = f"episode/{quote('tools/run', safe='')}/train/1/0"
PAGES = [
    ("", f"{ROWS} === 2"),
    (TOOLS, "document.querySelectorAll('.call').length === 1"),
    ("curves/RUN", "document.querySelectorAll('.u-wrap canvas').length === 2"),
    ("episodes/RUN", f"{ROWS} >= 12"),
    ("episode/RUN/train/1/0", "document.querySelectorAll('.token').length > 50"),
    ("episode/RUN/train/1/1", "document.querySelectorAll('.token').length > 50"),
    ("episode/RUN/train/1/2", "document.querySelectorAll('.token').length > 50"),
    ("episode/RUN/train/1/3", "document.querySelectorAll('.peer').length === 4"),
    ("step/RUN/2", "document.querySelectorAll('.square').length === 6"),
    ("diff/RUN/RUN", "document.body.innerText.includes('Equal')"),
]


@pytest.mark.parametrize(("path", "ready"), PAGES)
def test_hostile_texts_stay_texts_and_nothing_leaves_the_machine(opened, path, ready):
    page, url = opened[:2]
    visit(opened, path, ready)
    assert page.run("return window.hit === undefined")
    made = "return document.querySelectorAll('main script, main img, main iframe, main style, [onclick], [onerror], a[href^=javascript]').length"
    assert page.run(made) == 0
    addresses = page.requested()
    own = (url, "data:", "chrome:", "chrome-untrusted:")
    assert addresses and all(one.startswith(own) for one in addresses)


def test_directions_and_controls_are_named_where_they_stand(opened):
    page = visit(opened, "episode/RUN/train/1/3", "document.querySelectorAll('.peer').length === 4")
    text = page.run("return document.querySelector('.message.sampled pre').textContent")
    assert "abcU+202Edef" in text and "bell␇" in text and "null␀" in text and "U+200B" in text
    shown = page.run("return document.body.innerText")
    assert not {"\u202e", "\u2066", "\x00", "\x1b", "\x07"} & set(shown)
    assert HOSTILE[0] in visit(opened, *PAGES[4]).run("return document.body.innerText")


def test_a_command_to_copy_is_safe_in_a_shell_whatever_the_names_are(opened):
    page = visit(opened, "episode/RUN/train/1/2", "document.querySelectorAll('.peer').length === 4")
    shown = page.run("return [...document.querySelectorAll('details pre')].pop().textContent")
    assert shown.startswith("tandem why ")
    script = shown.replace("tandem", "printf '%s\\n'", 1)
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout.splitlines()
    assert words[:-1] == ["why", NAME, "--episode", f"1:{HOSTILE[0]}:2", "--json"]
    assert words[-1].startswith(f"{NAME}/why/")


def test_a_row_of_a_run_under_way_appears_by_itself(opened):
    """Attempts that said the same share it."""
    page = visit(opened, "episodes/RUN", f"{ROWS} === 12")
    add_step(opened[2], 3, [group("new", ["brand new text"] * 3, [1.0, 1.0, 0.0])], reward=0.9)
    page.until(f"return {ROWS} === 14 && document.body.innerText.includes('brand new text')")
    assert words_of(page, ".episode-row .meta")[0] == "14 tokens · stop #0 #1"
    assert words_of(page, ".problem .meta code")[0] == "7"  # the expected answer


def test_runs_are_filtered_by_what_is_known_of_them(opened):
    page = visit(opened, *PAGES[0])
    write = "const f = document.querySelector('input[type=search]'); f.value = {!r}; f.dispatchEvent(new Event('input'))"
    for text, shown in (("train TOOLS/", 1), ("sft", 0), ("", 2)):
        page.run(write.format(text))
        assert page.run(f"return {ROWS}") == shown


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(a browser, the address, the folder) of two runs; at step 2 they part, learn m and lose n."""
    root = tmp_path_factory.mktemp("two")
    rl = {"advantage": "rloo", "kl_coef": 0.5, "entropy_coef": 0.25}
    for name, rewards in (("a", [1.0, 0.0]), ("b", [0.0, 1.0])):
        run = make_run(root / name, steps=9, rl=rl)
        for step in (1, 2):
            told = rewards if step == 2 else [1.0, 0.0]
            numbers = {"policy_loss": 0.5, "reference_kl": 0.25, "entropy": 1.0}
            numbers |= {"eval/sampled": 0.5, "eval/sampled_interval": 0.05}
            groups = [group("p", ["first", "second one"], told), group("q", ["x", "x"], [1.0, 1.0])]
            held = [group(uid, ["x"], [float((uid == "m") == (step == 2))]) for uid in "mn"]
            write_episodes(run / "episodes", step, held, "eval_sampled")
            add_step(run, step, groups, reward=0.5, **numbers)
    with viewing(root) as url, browser() as page:
        yield page, url, root


def test_step_page_says_how_the_loss_came_about_and_has_advantages(compared):
    page, url, _ = compared
    page.open(f"{url}/#/step/a/2")
    page.until("return document.querySelectorAll('.square').length === 8")
    text = page.run("return document.body.innerText")
    loss = "policy loss 0.5 + 0.5 × KL 0.25 - 0.25 × entropy 1 = 0.375"
    signal = "1 of them carry a signal; in the other 1 every advantage is 0"
    for told in (f"loss tokens: {loss}", signal, "sampled: 1 learned, 1 lost, 0 as before"):
        assert told in text
    assert words_of(page, ".square small") == ["+1", "-1", "0", "0"]
    assert words_of(page, ".group .chip")[1:4] == ["advantage 0", "sampled", "lost"]
    page.run("document.querySelector('.bar input[type=checkbox]').click()")
    assert words_of(page, ".group:not([hidden]) b") == ["p", "n", "m"]


def test_episode_page_paints_advantages_and_tells_a_tokens_values(compared):
    page, url, root = compared
    page.open(f"{url}/#/episode/a/train/1/1")
    page.until("return document.querySelectorAll('.token').length === 10")
    assert words_of(page, ".choice button") == ["log-prob", "weights", "advantage"]
    page.run("document.querySelectorAll('.choice button')[2].click()")
    painted = "[...document.querySelectorAll('.token')].map(e => e.style.getPropertyValue('--hue') + e.style.getPropertyValue('--share'))"
    assert set(page.run(f"return {painted}")) == {"885%"}  # red: its advantage is -1
    assert words_of(page, ".choice .on") == ["advantage"]
    box = page.run(
        "const b = document.querySelectorAll('.token')[3].getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    page.mouse("mouseMoved", *box)
    page.until("return document.querySelector('.readout').textContent.includes('advantage -1')")
    readout = page.run("return document.querySelector('.readout').textContent")
    assert "position 7 · token 21 · log-prob -0.07" in readout and "weights 0" in readout
    page.run("document.querySelectorAll('.choice button')[0].click()")  # for the pages after it
    [path] = root.glob("a/episodes/train_step_000001.parquet")
    key = pq.read_table(path).column("key").to_pylist()[1]
    rows = [{"advantage": -1.0, "ratio": 1.5 if n > 4 else 1.0} for n in range(14)]
    (root / "a/why").mkdir()
    (root / f"a/why/{key}.json").write_text(json.dumps({"tokens": rows}))
    page.until("return document.querySelectorAll('.choice button').length === 4")  # as it appears


def test_two_runs_share_a_chart_with_an_interval_each_and_can_be_smoothed(compared):
    page, url, root = compared
    for name in ("a", "b"):
        for step in (10, 20, 30):
            value = step / 100 + (name == "b") / 10
            numbers = {"eval/greedy": value, "eval/sampled": value, "eval/sampled_interval": 0.05}
            add_step(root / name, step, **numbers)
        (root / name / "log.txt").write_text(f"T warning at step 2: <b>{name}</b> is falling\n")
    page.open(f"{url}/#/curves/a,b")
    held = "[...document.querySelectorAll('.chart')].find(c => c.querySelector('h2').textContent.startsWith('Held-out'))"
    page.until(f"return {held}?.querySelector('canvas')")
    labels = f"return [...{held}.querySelectorAll('.u-series:not(.u-silent) .u-label')].map(e => e.textContent)"
    assert page.run(labels) == ["step", "a", "greedy", "b", "greedy"]
    last = f"return [...{held}.querySelectorAll('.u-series:not(.u-silent) .u-value')].map(e => e.textContent)"
    assert page.run(last) == ["30", "0.3", "0.3", "0.4", "0.4"]
    assert words_of(page, ".chart h2")[0] == "Held-out rewardsolid: sampled, dashed: greedy"
    assert "Constant: Reward 0.5 · Loss 0.5 · KL 0.25 · Entropy 1" in words_of(page, "p.dim")
    bounds = f"return {held}.querySelectorAll('.u-legend .u-silent').length"
    assert page.run(bounds) == 4  # low and high of each
    ink = f"return {held}.querySelector('canvas').toDataURL()"
    before = page.run(ink)
    slide = "const s = document.querySelector('input[type=range]'); s.value = {}; s.dispatchEvent(new Event('input'))"
    page.run(slide.format(0.9))
    page.until(f"{bounds} === 8")  # and what is smoothed, faint
    page.until(f"return (() => {{ {ink} }})() !== {json.dumps(before)}")
    page.run(slide.format(0))
    page.until(f"{bounds} === 4")
    falling = [f"{name}: warning at step 2: <b>{name}</b> is falling" for name in ("a", "b")]
    assert words_of(page, "details li") == falling


@pytest.mark.parametrize(("path", "ready"), PAGES)
def test_a_narrow_screen_needs_no_scrolling_sideways(opened, path, ready):
    page = opened[0]
    page.resize(400, 800, dark=True)
    try:
        visit(opened, path, ready)
        assert page.run("return document.documentElement.scrollWidth") <= 400
        background = "return getComputedStyle(document.body).backgroundColor"
        assert page.run(background) == "rgb(15, 19, 24)"
        page.run("document.getElementById('theme').click()")
        assert page.run(background) != "rgb(15, 19, 24)"
        page.run("localStorage.clear(); delete document.documentElement.dataset.theme")
    finally:
        page.resize(1440, 900)


def test_rows_of_a_training_beside_the_page_appear_in_it(tmp_path):
    root, home = tmp_path / "runs", make_home(tmp_path, steps=3)
    root.mkdir()
    command = [sys.executable, "-m", "tandem", "train", str(home / "recipe.toml")]
    command += [f"run.folder={root}/mine", "rl.prompts_per_step=2", "rl.group_size=2"]
    log = (tmp_path / "out.txt").open("w")
    with viewing(root) as url, browser() as page, log:
        page.open(url)
        page.until("return document.body.innerText.includes('There is no run in')")
        with subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as process:
            try:
                page.until("return document.querySelector('.chip.running')")
                page.run("location.hash = '#/episodes/mine'")
                page.until(f"return {ROWS} >= 4")  # of a step, and more as they are made
                page.until(
                    f"return {ROWS} > 0 && /^3:/.test(document.querySelector('.meta b').textContent)"
                )
                page.run("location.hash = '#/'")
                page.until("return document.querySelector('.chip.finished')")
                assert words_of(page, ".c3.num") == ["3 / 3"]
                assert process.wait(WAIT_S) == 0
            finally:
                process.kill()
