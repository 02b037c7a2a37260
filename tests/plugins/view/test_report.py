"""`tandem report` and `tandem plot`: whole, true to the run, and no text of a model is markup."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tandem.plugins.view.report import panels, report
from tandem.plugins.view.runs import Run
from tandem.plugins.view.svg import Line, Panel, figure
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.errors import UserError
from tests.support.command import tandem
from tests.support.past_runs import past_run
from tests.support.viewing import add_step, group, keep_image, make_run

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202egnp\x00 &amp;"


class Tags(HTMLParser):
    """Collects tags, attributes and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def opened(folder, name="run"):
    run = Run(folder, name)
    run.refresh()
    return run


def test_texts_of_a_model_are_no_markup_in_a_report(tmp_path):
    folder = make_run(tmp_path / HOSTILE.replace("/", "").replace("\x00", ""))
    add_step(folder, 1, [group(HOSTILE, [HOSTILE, "fine"], [1.0, 0.0], prompt=HOSTILE)], reward=0.5)
    page = report(opened(folder, folder.name))
    tags = Tags(page)
    assert not {"script", "img", "iframe", "link"} & {tag for tag, _ in tags.found}
    assert not any(name.startswith("on") for _, having in tags.found for name in having)
    assert "<script>alert(1)</script>" in tags.text and "\\u202e" in tags.text
    assert not re.search(r"[\x00\x1b\u202e]", page)
    assert not re.search(r"(src|href)=", page.replace(" src=x", ""))
    assert "default-src 'none'" in page


def test_a_report_of_a_real_run_shows_its_figures_and_episodes(tmp_path):
    folder = past_run("ema")
    out = tmp_path / "report.html"
    code, stdout, stderr = tandem("report", folder, "--out", out, cwd=tmp_path)
    assert code == 0 and str(out) in stdout, stderr
    page = out.read_text()
    last = read_metrics(folder)[-1]
    assert f"{last['reward']:.4g}" in page and f"{last['eval/sampled']:.3f}" in page
    assert page.count("<polygon") == 1  # the interval of the held-out reward
    assert page.count("<polyline") >= 8 and page.count("<article>") >= 6
    assert "rl.prompts_per_step = " in page and "Log-prob gap 0" in page


def test_a_report_holds_the_images_that_its_episodes_read(tmp_path):
    run = make_run(tmp_path / "run")
    part = {"type": "image", "image": keep_image(run)}
    lost = {"type": "image", "image": "0123456789a"}
    add_step(run, 1, [group("p", ["a"], [1.0], prompt=[part, lost])], reward=1.0)
    tags = Tags(report(opened(run)))
    pictures = {attributes["src"] for tag, attributes in tags.found if tag == "img"}
    [(head, data)] = [picture.split(",") for picture in pictures]
    file = run / "images" / part["image"]
    assert head == "data:image/png;base64" and base64.b64decode(data) == file.read_bytes()
    assert "[image][image]" in tags.text


def test_a_plot_is_svg_whose_line_goes_through_the_values(tmp_path):
    values = [0.0, 1.0, 0.5, 2.0]
    picture = figure([Panel(title="a < b", lines=[Line(label="x & y", x=[0, 1, 2, 3], y=values)])])
    root = ElementTree.fromstring(picture)
    [line] = root.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    heights = [y for _, y in points]
    share = [(heights[0] - y) / (heights[0] - heights[3]) for y in heights]
    assert share == pytest.approx([v / 2 for v in values], abs=0.01)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "by step", "x & y 2", "0.5", "1"} <= set(texts)


def test_a_plot_as_png_has_the_line_and_the_texts(tmp_path):
    """Its pixels: the line's colour where the values are, the text's where the title is."""
    pytest.importorskip("resvg_py")
    add_step(make_run(tmp_path / "run"), 1, reward=0.25)
    add_step(tmp_path / "run", 2, reward=0.5)
    arguments = ["plot", "run", "--key", "reward", "-o"]
    for name in ("x.png", "x.svg"):
        assert tandem(*arguments, name, cwd=tmp_path)[0] == 0
    root = ElementTree.fromstring((tmp_path / "x.svg").read_text())
    picture = np.asarray(Image.open(tmp_path / "x.png").convert("RGB"))
    assert picture.shape == (2 * int(root.get("height")), 2 * int(root.get("width")), 3)
    [line] = root.iter("{http://www.w3.org/2000/svg}polyline")
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in line.get("points").split())
    middle = picture[round(y0 + y1), round(x0 + x1)]  # twice the middle of both
    assert tuple(middle) == tuple(bytes.fromhex(line.get("stroke")[1:]))
    title = picture[: 2 * 20]
    assert (title.sum(-1) < 3 * 80).sum() > 50  # dark pixels of "reward"


def test_plots_of_runs_without_steps_and_of_one_value(tmp_path):
    flat = make_run(tmp_path / "flat")
    add_step(flat, 1, reward=0.5)
    empty = make_run(tmp_path / "empty")
    assert [panel.title for panel in panels([opened(flat), opened(empty, "e")])] == ["Reward"]
    ElementTree.fromstring(figure(panels([opened(flat)])))
    for key, near in (("rewrad", "reward"), ("LOSS", "policy_loss"), ("loss", "policy_loss")):
        with pytest.raises(UserError, match=f"(?s)no run has such numbers.*did you mean {near}.$"):
            panels([opened(past_run("train"))], [key])
    assert "no step yet" in report(opened(empty))
