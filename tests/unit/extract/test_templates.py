"""Templates: a row or a conversation becomes the text Hugging Face would make of it, and nothing can be made to run."""

from __future__ import annotations

import importlib

import pytest

from penstock.domain.admission import BadInput
from penstock.extract.templates import (
    ChatTemplate,
    Unrendered,
    chat_template_of,
    columns_of,
    render_chat,
    render_row,
)
from tests.missing import need_module

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- for message in messages -%}\n"
    "    {%- if message.role == 'assistant' -%}\n"
    "        A:{% generation %}{{ message.content }}</s>{% endgeneration %}\n"
    "    {%- else -%}\n"
    "        U:{{ message.content | tojson }}\n"
    "    {%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if tools is not none %}tools{% endif -%}{%- set ns = namespace(count=0) -%}\n"
    "{%- for message in messages -%}{%- set ns.count = ns.count + 1 -%}{%- endfor -%}\n"
    "#{{ ns.count }}\n"
)
#: Drops what earlier answers thought, as Qwen3's does: an answer is written in two ways.
FORGETFUL = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief <&>."},
    {"role": "user", "content": "  How are you? é\n"},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still well, “thank you”."},
]


def answers(template: str, chat: list[dict[str, str]]) -> list[str]:
    text, spans = render_chat(ChatTemplate(template, VARIABLES), chat, mark_answers=True)
    return [text[start:stop] for start, stop in spans]


def test_a_row_is_written_with_its_columns() -> None:
    assert render_row("Q: {{ q }}\nA: {{ a | upper }}", {"q": "why?", "a": "so", "unused": 1}) == "Q: why?\nA: SO"


def test_a_template_says_which_columns_it_needs() -> None:
    assert columns_of("{{ q }}{% for each in steps %}{{ each.text }}{{ range(3) }}{% endfor %}") == {"q", "steps"}


def test_a_column_that_a_row_lacks_is_no_empty_place() -> None:
    with pytest.raises(Unrendered, match="'a' is undefined"):
        render_row("{{ q }} {{ a }}", {"q": "why?"})


def test_what_is_no_template_is_refused_with_the_line() -> None:
    with pytest.raises(BadInput, match="is no Jinja template: line 2: "):
        columns_of("fine\n{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ columns.__init__.__globals__ }}",
        "{{ columns.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ namespace(__class__=1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '%s' | attr('__class__') }}{{ ''['__class__'].__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 100000000 }}",
        "{{ [0] * 1000000000 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ columns + 1 }}",
        "{{ columns[7].x }}",
    ],
)
def test_a_template_can_neither_leave_the_sandbox_nor_fill_the_memory(attack: str) -> None:
    with pytest.raises((Unrendered, BadInput)):
        render_row(attack, {"columns": [1]})


def test_dates_and_the_like_are_plain_text_for_templates() -> None:
    import datetime

    row = {"at": datetime.date(2026, 11, 15), "list": ({"x": datetime.date(2026, 1, 2)},)}
    assert render_row("{{ at }} {{ list[0].x }}", row) == "2026-11-15 2026-01-02"


def test_templates_know_no_time() -> None:
    """Llama's falls back to a fixed date; a clock would give the same row two texts."""
    clock = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}"
    assert render_chat(ChatTemplate(clock), CHAT)[0] == "26 Jul 2024"


@pytest.mark.parametrize("template", [CHATML, LLAMA2, MARKED, FORGETFUL])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:3], CHAT[1:2]])
@pytest.mark.parametrize("open_answer", [False, True])
def test_a_conversation_is_written_as_hugging_face_writes_it(
    template: str, chat: list[dict[str, str]], open_answer: bool
) -> None:
    need_module("transformers")
    rendering = importlib.import_module("transformers.utils.chat_template_utils")
    marks = "{% generation" in template
    expected, spans = rendering.render_jinja_template(
        [chat],
        chat_template=template,
        return_assistant_tokens_mask=marks,
        add_generation_prompt=open_answer,
        **VARIABLES,
    )
    text, found = render_chat(ChatTemplate(template, VARIABLES), chat, mark_answers=marks, open_answer=open_answer)
    assert text == expected[0]
    if marks:
        assert [list(span) for span in found] == [list(span) for span in spans[0]]


def test_answers_are_found_by_the_marks_of_the_template() -> None:
    assert answers(MARKED, CHAT) == ["Well.</s>", "Still well, “thank you”.</s>"]


def test_answers_are_found_without_marks_by_what_each_message_adds() -> None:
    assert answers(CHATML, CHAT) == ["Well.<|im_end|>\n", "Still well, “thank you”.<|im_end|>\n"]
    assert answers(LLAMA2, CHAT) == [" Well. </s>", " Still well, “thank you”. </s>"]


def test_a_template_that_rewrites_earlier_answers_is_not_guessed_at() -> None:
    assert answers(FORGETFUL, CHAT) == ["Well.", "Still well, “thank you”."]
    thinking = [*CHAT[:2], {"role": "assistant", "content": "<think>hm</think>Well."}, *CHAT[3:]]
    with pytest.raises(Unrendered, match="does not show which part the assistant wrote"):
        answers(FORGETFUL, thinking)


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([], "has no messages"),
        (["hello"], "message 1 is no object with a role"),
        ([{"content": "x"}], "message 1 is no object with a role"),
        ([{"role": "user", "content": "\ufdd0"}], "message 1 has a character that Unicode reserves"),
        ([{"role": "assistant", "content": "x"}], "Conversation roles must alternate"),
        ([{"role": "user", "content": None}], "the template"),
    ],
)
def test_a_conversation_that_cannot_be_written_says_why(chat: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(Unrendered, match=reason):
        render_chat(ChatTemplate(LLAMA2, VARIABLES), chat)


def test_the_template_of_a_model_is_found_where_models_keep_it() -> None:
    tokens = b'"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null'
    inside = b'{"chat_template": "{{ bos_token }}x", ' + tokens + b"}"
    assert chat_template_of(inside, None, "m") == ChatTemplate("{{ bos_token }}x", VARIABLES)
    assert chat_template_of(inside, b"alone", "m") == ChatTemplate("alone", VARIABLES)
    several = b'{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}'
    assert chat_template_of(several, None, "m").text == "d"
    with pytest.raises(BadInput, match="has no chat template"):
        chat_template_of(b"{}", None, "m")
    with pytest.raises(BadInput, match=r"tokenizer_config\.json that cannot be read"):
        chat_template_of(b"{", None, "m")
    with pytest.raises(BadInput, match="is no Jinja template"):
        chat_template_of(None, b"{% if %}", "m")
