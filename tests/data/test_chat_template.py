"""Chat templates: many chats at once, after an error, and beside threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.data.chat_template import ChatTemplate
from tandem.runtime.errors import UserError

SOURCE = (
    "{% if messages[0].content == 'raise' %}{{ raise_exception('not this one') }}{% endif %}"
    "{{ messages[0].content }}{{ '!' if add_generation_prompt }}"
)


def chat(text):
    return [{"role": "user", "content": text}]


def render(template, *texts):
    return template.render([chat(text) for text in texts], open_turn=True, variables={})


def test_a_refused_chat_is_named_and_others_are_rendered_after_it():
    template = ChatTemplate(SOURCE, "m")
    chats = [chat("before"), [*chat("raise"), {"role": "tool", "content": "7"}], chat("after")]
    with pytest.raises(UserError, match="roles user, tool"):
        template.render(chats, open_turn=True, variables={})
    assert render(template, "next") == ["next!"]
    assert render(template) == []
    with pytest.raises(UserError, match="a chat without messages"):
        template.render([[]], open_turn=True, variables={})


def test_threads_get_the_texts_of_their_own_chats():
    template = ChatTemplate(SOURCE, "m")

    def work(name):
        return [render(template, f"{name} {i}")[0] for i in range(50)]

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(work, "abcd"))
    assert texts == [[f"{name} {i}!" for i in range(50)] for name in "abcd"]


@pytest.mark.parametrize("chance", ["{{ lipsum() }}", "{{ [1, 2] | random }}"])
def test_a_template_cannot_write_what_is_other_each_time(chance):
    with pytest.raises(UserError):
        render(ChatTemplate(chance, "m"), "a")
