"""The process that renders chats: many at once, after an error, beside threads, and gone at the
end."""

import gc
import os
import threading
from pathlib import Path

import pytest

from tandem.data import chat_template
from tandem.data.chat_template import ChatTemplate
from tandem.runtime.errors import UserError
from tandem.runtime.processes import ZOMBIE, state_of
from tests.support.waiting import eventually

SOURCE = (
    "{% if messages[0].content == 'raise' %}{{ raise_exception('not this one') }}{% endif %}"
    "{% if messages[0].content == 'memory' %}{{ 'a'.ljust(10**9) | length }}{% endif %}"
    "{% if messages[0].content == 'time' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}{{ '!' if add_generation_prompt }}"
    "{% if messages[0].content == 'long' %}{{ 'a' * 4000000 }}{% endif %}"
)


def chat(text):
    return [{"role": "user", "content": text}]


def render(template, *texts):
    return template.render([chat(text) for text in texts], open_turn=True, variables={})


def pid_of(template):
    return template._idle[-1].pid


def ended(pid):
    return eventually(lambda: state_of(pid) in ("", ZOMBIE))


def test_chats_larger_than_a_batch_keep_their_order():
    texts = ["a" * 700_000, "b", "é" * 400_000, "c" * 900_000, "d"]
    assert render(ChatTemplate(SOURCE, "m"), *texts) == [f"{text}!" for text in texts]


def test_no_chats_have_no_texts():
    assert render(ChatTemplate(SOURCE, "m")) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [("raise", "roles user, tool"), ("memory", "too long a text"), ("time", "of 2 messages")],
)
def test_a_refused_chat_is_named_and_others_are_rendered_after_it(text, what):
    template = ChatTemplate(SOURCE, "m")
    chats = [chat("before"), [*chat(text), {"role": "tool", "content": "7"}], chat("after")]
    with pytest.raises(UserError, match=what):
        template.render(chats, open_turn=True, variables={})
    assert render(template, "next") == ["next!"]


def test_chats_that_take_too_much_only_together_are_rendered_one_by_one():
    texts = render(ChatTemplate(SOURCE, "m"), *["long"] * 150)  # 600 MB, of at most 512
    assert len(texts) == 150 and {len(text) for text in texts} == {4_000_005}


def test_a_process_that_was_killed_while_idle_is_replaced():
    template = ChatTemplate(SOURCE, "m")
    render(template, "a")
    os.kill(pid_of(template), 9)
    template._idle[-1]._process.wait()
    assert render(template, "b") == ["b!"]


def test_a_slow_chat_does_not_keep_another_thread_waiting():
    template, order = ChatTemplate(SOURCE, "m"), []

    def slow():
        with pytest.raises(UserError):
            render(template, "time")
        order.append("slow")

    render(template, "first")
    thread = threading.Thread(target=slow)
    thread.start()
    render(template, "quick")
    order.append("quick")
    thread.join()
    assert order == ["quick", "slow"]


def test_the_process_has_no_keys_and_writes_no_file(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = ChatTemplate(SOURCE, "m")
    render(template, "a")
    environment = Path(f"/proc/{pid_of(template)}/environ").read_text()
    limits = Path(f"/proc/{pid_of(template)}/limits").read_text()
    assert "secret" not in environment and "Max file size             0 " in limits


def test_an_interrupted_rendering_leaves_no_answer_behind():
    class Stopped(Exception):
        pass

    class Interrupted:
        """Standard output of the process; a signal arrives while it is read."""

        def readline(self):
            raise Stopped

        def close(self):
            pass

    template = ChatTemplate(SOURCE, "m")
    render(template, "a")
    template._idle[-1].stdout.close()
    template._idle[-1].stdout = Interrupted()
    with pytest.raises(Stopped):
        render(template, "b")
    assert render(template, "c") == ["c!"]


def test_threads_get_the_texts_of_their_own_chats():
    template, texts = ChatTemplate(SOURCE, "m"), {}

    def work(name):
        texts[name] = [render(template, f"{name} {i}")[0] for i in range(50)]

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {name: [f"{name} {i}!" for i in range(50)] for name in "abcd"}


def test_the_process_ends_with_its_template():
    template = ChatTemplate(SOURCE, "m")
    render(template, "a")
    pid = pid_of(template)
    del template
    gc.collect()
    assert ended(pid)


def test_a_json_py_in_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert render(ChatTemplate(SOURCE, "m"), "a") == ["a!"]


def test_a_text_one_character_too_long_is_refused():
    template = ChatTemplate(SOURCE, "m")
    most = chat_template.LONGEST_TEXT
    assert len(render(template, "x" * (most - 1))[0]) == most
    with pytest.raises(UserError, match="too long a text"):
        render(template, "x" * most)
