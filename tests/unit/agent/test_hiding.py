"""Values of secrets are taken out of text and JSON values in each form in which they travel."""

from __future__ import annotations

import json
from urllib.parse import quote, quote_plus

import pytest

from penstock.agent.hiding import forms, hide, hide_all

SECRETS = (
    "plain-s3cret",
    'with "quotes" and \\',
    "line one of a key file\nline two of a key file",
    "ümläut/+ &",
    "12345678",
)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", [str, repr, json.dumps, quote_plus, lambda text: quote(text, safe="")])
def test_no_form_remains(secret: str, form: object) -> None:
    told = form(secret)  # type: ignore[operator]
    bare = told[1:-1] if told[:1] in "'\"" and told[:1] == told[-1:] else told
    assert bare not in hide(f"before {told} after", (secret,))
    assert hide(f"before {told} after", (secret,)).startswith("before ")


def test_lines_of_a_key_file_are_hidden_one_by_one() -> None:
    assert hide("it printed line two of a key file", SECRETS) == "it printed ***"


def test_one_secret_may_be_part_of_another() -> None:
    assert hide("abcdefgh abcd", ("abcd", "abcdefgh")) == "*** ***"


def test_what_is_too_short_to_be_a_secret_ruins_no_text() -> None:
    assert forms(["abc", ""]) == ()
    assert hide("abc", ("abc", "")) == "abc"


def test_all_text_of_a_json_value_is_cleaned_and_the_rest_is_as_it_was() -> None:
    value = {"a": ["plain-s3cret", 1, None, True, 2.5, 12345678], "plain-s3cret!": {"b": "x plain-s3cret"}}
    assert hide_all(value, SECRETS) == {"a": ["***", 1, None, True, 2.5, "***"], "***!": {"b": "x ***"}}
    assert hide_all(value, ()) is value
