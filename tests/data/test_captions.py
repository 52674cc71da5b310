"""The caption rows of what must be right: missing, empty and undecodable captions are dropped, words stay words."""

import pytest

from disco_jax.data.captions import clean_caption
from disco_jax.data.examples import BadExample


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a red square\n", "a red square"),
        ("  a  red\tsquare ", "a  red\tsquare"),  # white space inside is the tokenizer's
        ("NA", "NA"),
        ("nan", "nan"),
        (b"None", "None"),
        ("\u00e9t\u00e9 \U0001f600".encode(), "\u00e9t\u00e9 \U0001f600"),
        ("<|endoftext|>", "<|endoftext|>"),
        (b"a\nb", "a\nb"),
    ],
)
def test_text_is_kept(raw, text):
    assert clean_caption(raw) == text


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "caption:missing"),
        ("", "caption:empty"),
        (b"", "caption:empty"),
        (b" \n\t", "caption:empty"),
        ("\u3000\u00a0", "caption:empty"),
        (b"caf\xe9", "caption:not_utf8"),
        ("a \ud83d b", "caption:not_utf8"),  # half a surrogate pair, as a JSON caption can hold
    ],
)
def test_bad_captions_are_named(raw, reason):
    with pytest.raises(BadExample) as error:
        clean_caption(raw)
    assert error.value.reason == reason
