"""Stored captions to text; what the text means is the tokenizer's concern."""

from disco_jax.data.examples import BadExample


def clean_caption(raw: bytes | str | None) -> str:
    """The caption as text, without the white space around it. "NA" and "nan" are words like any other.

    Args:
        raw: the caption as stored; bytes are UTF-8, None means there is none.

    Raises:
        BadExample: `caption:missing`, `caption:not_utf8`, or `caption:empty` when only white space is left.
    """
    if raw is None:
        raise BadExample("caption:missing", "there is no caption")
    try:
        # a JSON caption can hold half of a surrogate pair, which no tokenizer takes
        text = raw.decode() if isinstance(raw, bytes) else raw.encode().decode()
    except UnicodeError as error:
        raise BadExample("caption:not_utf8", f"the caption is not UTF-8: {error}") from error
    text = text.strip()
    if not text:
        raise BadExample("caption:empty", "the caption is empty")
    return text
