"""Templates: a row or a conversation becomes the text Hugging Face would make of it, and nothing can be made to run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

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
from tests.unit.extract.chat_templates import GEMMA2, LLAMA3, QWEN3, QWEN25

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
#: Drops what earlier answers thought: an answer is written in two ways.
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


def answers(template: str, chat: Sequence[Mapping[str, object]]) -> list[str]:
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


@pytest.mark.parametrize("template", [CHATML, LLAMA2, MARKED, FORGETFUL, QWEN25, QWEN3, LLAMA3, GEMMA2])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:3], CHAT[1:2]])
@pytest.mark.parametrize("open_answer", [False, True])
def test_a_conversation_is_written_as_hugging_face_writes_it(
    template: str, chat: list[dict[str, str]], open_answer: bool
) -> None:
    need_module("transformers")
    rendering = importlib.import_module("transformers.utils.chat_template_utils")
    marks = "{% generation" in template
    if template == GEMMA2:
        chat = [message for message in chat if message["role"] != "system"]  # which it refuses
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


THOUGHT = "<think>\nhm, <b>well</b>\n</think>\n\n"
THINKING = [
    *CHAT[:2],
    {"role": "assistant", "content": f"{THOUGHT}Well."},
    CHAT[3],
    {"role": "assistant", "content": f"{THOUGHT}Still well. \n"},
]


def test_answers_of_a_template_that_rewrites_earlier_ones_are_what_it_leaves_of_them() -> None:
    assert answers(FORGETFUL, CHAT) == ["Well.", "Still well, “thank you”."]
    assert answers(FORGETFUL, THINKING) == ["\n\nWell.", f"{THOUGHT}Still well. \n"]
    nothing = "<think>\n\n</think>\n\n"
    assert answers(QWEN3, CHAT) == ["Well.<|im_end|>\n", f"{nothing}Still well, “thank you”.<|im_end|>\n"]
    assert answers(QWEN3, THINKING) == ["Well.<|im_end|>\n", f"{THOUGHT}Still well. \n<|im_end|>\n"]
    assert answers(QWEN3, CHAT[:3]) == [f"{nothing}Well.<|im_end|>\n"]
    kept_apart = [*CHAT[:4], {"role": "assistant", "content": "Still well.", "reasoning_content": "hm"}]
    assert answers(QWEN3, kept_apart) == ["Well.<|im_end|>\n", "<think>\nhm\n</think>\n\nStill well.<|im_end|>\n"]


def test_what_an_answer_asks_of_tools_is_the_assistants_and_what_they_say_is_not() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the <sky>"}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat: list[Mapping[str, object]] = [
        *CHAT[:4],
        asked,
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "It is blue."},
    ]
    called = '<tool_call>\n{"name": "look", "arguments": {"at": "the <sky>"}}\n</tool_call><|im_end|>\n'
    assert answers(QWEN25, chat) == ["Well.<|im_end|>\n", called, "It is blue.<|im_end|>\n"]
    assert answers(QWEN3, chat) == ["Well.<|im_end|>\n", called, "<think>\n\n</think>\n\nIt is blue.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "ending"), [(CHATML, "<|im_end|>\n"), (QWEN25, "<|im_end|>\n"), (LLAMA3, "<|eot_id|>")]
)
def test_a_conversation_may_begin_with_an_answer(template: str, ending: str) -> None:
    assert answers(template, [CHAT[2], *CHAT[3:]]) == [f"Well.{ending}", f"Still well, “thank you”.{ending}"]
    assert answers(template, [CHAT[2]]) == [f"Well.{ending}"]


def test_a_conversation_with_qwen3_may_begin_with_an_answer() -> None:
    assert answers(QWEN3, CHAT[2:4]) == ["Well.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "begin", "end"), [(LLAMA3, "", "<|eot_id|>"), (GEMMA2, "", "<end_of_turn>\n"), (LLAMA2, " ", " </s>")]
)
def test_answers_are_found_in_templates_that_strip_them(template: str, begin: str, end: str) -> None:
    chat = [*CHAT[1:4], {"role": "assistant", "content": "\n Still <|eot_id|> well.  "}]
    assert answers(template, chat) == [f"{begin}Well.{end}", f"{begin}Still <|eot_id|> well.{end}"]


@pytest.mark.parametrize("template", [CHATML, QWEN25, LLAMA3, GEMMA2])
@pytest.mark.parametrize("open_answer", [False, True])
def test_marks_find_the_same_answers_as_what_messages_add(template: str, open_answer: bool) -> None:
    chat = [*CHAT[1:4], {"role": "assistant", "content": "<think>\nhm</think> <|im_start|>assistant\nStill well."}]
    text, spans = render_chat(ChatTemplate(template, VARIABLES), chat, mark_answers=True, open_answer=open_answer)
    # No beginning of a conversation is written as in the whole of it.
    counting = ChatTemplate("{{ messages | length }}" + template, VARIABLES)
    again = render_chat(counting, chat, mark_answers=True, open_answer=open_answer)
    assert again == (f"4{text}", tuple((start + 1, stop + 1) for start, stop in spans))
    assert len(spans) == 2


def test_a_template_may_refuse_the_beginning_of_a_conversation() -> None:
    """As one that wants each call of a tool to be followed by its result."""
    template = (
        "{% if messages[-1].call %}{{ raise_exception('no result') }}{% endif %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat: list[dict[str, object]] = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "I look.", "call": True},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "It is 21."},
    ]
    assert answers(template, chat) == ["I look.", "It is 21.</s>"]


def test_an_answer_that_is_not_ended_as_the_last_one_is_its_content_alone() -> None:
    """As Phi-3's: the last message is followed by something else than the others."""
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    )
    assert answers(template, CHAT) == ["Well.", "Still well, “thank you”.<|end|></s>"]


@pytest.mark.parametrize(
    "way",
    [
        "{{ message.content[:4] if not loop.last else message.content }}",
        "{{ message.content | length }} {{ 'last' if loop.last }}",
        "{{ message.content if loop.last else '2 x' ~ message.content ~ message.content }}",
        "{{ (message.content if loop.last else message.content.split('ll')[-1]) }}",
    ],
)
def test_a_template_that_does_something_else_with_answers_is_not_guessed_at(way: str) -> None:
    template = f"{{% for message in messages %}}[{{{{ message.role }}}}]{way}{{% endfor %}}"
    with pytest.raises(Unrendered, match="does not show which part the assistant wrote"):
        answers(template, CHAT)


def test_a_template_that_turns_the_conversation_round_is_not_guessed_at() -> None:
    with pytest.raises(Unrendered, match="does not show which part the assistant wrote"):
        answers("{% for message in messages[::-1] %}{{ message.content }}{% endfor %}", CHAT)


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([], "has no messages"),
        (["hello"], "message 1 is no object with a role"),
        ([{"content": "x"}], "message 1 is no object with a role"),
        ([{"role": "user", "content": "\ufdd0"}], "message 1 has a character that Unicode reserves"),
        ([{"role": "user", "content": "x", "tool": [{"y": "\ufdef"}]}], "message 1 has a character that Unicode"),
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
