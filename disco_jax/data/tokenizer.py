"""Captions to token ids: CLIP's byte-level BPE, or any Hugging Face `tokenizer.json`."""

import gzip
import html
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import ftfy
import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import models, pre_tokenizers

# CLIP's split: contractions, runs of letters, single digits, runs of anything else. Upstream it ignores case, which on
# lower-case text changes two characters: the long s counts as s, and the combining iota (U+0345) matches nothing.
_WORDS = r"'[s\u017f]|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}\u0345]+"


class Tokenizer:
    """Turns captions into rows of ids. Made by `load_tokenizer`; safe to call from threads, and picklable.

    Attributes:
      vocab_size: one more than the largest id.
      sot_id: the start-of-text id, first in each row.
      eot_id: the end-of-text id, last in each row before the zeros.
    """

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        clean: Callable[[str], str],
        *,
        vocab_size: int,
        sot_id: int,
        eot_id: int,
        path: str | None,
    ):
        self.vocab_size = vocab_size
        self.sot_id = sot_id
        self.eot_id = eot_id
        self._model = model
        self._clean = clean
        self._path = path

    def __call__(self, texts: Sequence[str], context_length: int) -> Int32[np.ndarray, "n L"]:
        """Ids of each text: start of text, the text, end of text, zeros up to `context_length`.

        A text too long for `context_length` is cut, with end of text last. A special token written in a text is plain
        text and never gets its id.

        Raises:
          ValueError: `texts` is one string, or `context_length` is below 2.
        """
        if isinstance(texts, str):
            raise ValueError(f"the tokenizer wants a list of texts, not one string: [{texts[:40]!r}]")
        if context_length < 2:
            raise ValueError(f"context_length {context_length} has no room for start and end of text: give 2 or more")
        rows = np.zeros((len(texts), context_length), np.int32)
        cleaned = [self._clean(text) for text in texts]
        for row, encoding in zip(rows, self._model.encode_batch_fast(cleaned, add_special_tokens=False), strict=True):
            ids = encoding.ids[: context_length - 2]
            row[: len(ids) + 2] = [self.sot_id, *ids, self.eot_id]
        return rows

    def __reduce__(self) -> tuple[Callable[[str | None], "Tokenizer"], tuple[str | None]]:
        return load_tokenizer, (self._path,)


def load_tokenizer(path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The CLIP tokenizer (`path=None`; ids as open_clip's `SimpleTokenizer` gives), or the one in a `tokenizer.json`.

    CLIP's: vocabulary 49,408, start of text 49,406, end of text 49,407. Texts are mended (ftfy), HTML-unescaped twice,
    their white space collapsed, and lower-cased. A file's: the same without the lower-casing, then the file's own
    normalisation; start and end of text are what its post-processor puts around a text; its truncation and padding
    are not used.

    Raises:
      FileNotFoundError: no file at `path`.
      ValueError: the file is no `tokenizer.json`, or does not put a start and an end of text around a text, or gives
        their ids to text.
    """
    return _clip_tokenizer() if path is None else _file_tokenizer(os.fspath(path))


def clip_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """CLIP's tokens in the order of their ids, without the two special ones that follow, and the merges of its BPE."""
    packed = resources.files(__package__).joinpath("clip_bpe.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").splitlines()
    merges = [(first, second) for first, second in (line.split(" ") for line in lines)]
    # Bytes come first, the printable ones as themselves and ahead of the rest, which stand as U+0100 and on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    return [*alphabet, *(c + "</w>" for c in alphabet), *(first + second for first, second in merges)], merges


def _clip_tokenizer() -> Tokenizer:
    tokens, merges = clip_vocabulary()
    # The two special tokens are left out of the model, so that no text can give their ids.
    model = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
        )
    )
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    n = len(tokens)
    return Tokenizer(model, _clean_lower, vocab_size=n + 2, sot_id=n, eot_id=n + 1, path=None)


def _file_tokenizer(path: str) -> Tokenizer:
    cure = "give a Hugging Face tokenizer.json, or no path for the CLIP tokenizer"
    try:
        model = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no tokenizer file {path}: {cure}") from None
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"cannot read {path} as a tokenizer.json ({' '.join(str(error).split())}): {cure}") from None
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True  # one written in a text is text

    probe = model.encode("a")
    special = [i for i, added in zip(probe.ids, probe.special_tokens_mask, strict=True) if added]
    if len(special) != 2 or special != [probe.ids[0], probe.ids[-1]] or special[0] == special[1]:
        raise ValueError(
            f"{path} does not put a start-of-text and another end-of-text token around a text: "
            "give its post_processor a template '<start> $A <end>'"
        )
    sot_id, eot_id = special
    names = [str(model.id_to_token(i)) for i in special]
    if set(special) & set(model.encode(" ".join(names), add_special_tokens=False).ids):
        raise ValueError(f"{path} takes {names} in a text for special tokens: mark them special in its added_tokens")
    vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(model, _clean_space, vocab_size=vocab_size, sot_id=sot_id, eot_id=eot_id, path=path)


def _clean_space(text: str) -> str:
    # ftfy holds the interpreter's lock and takes longer than all the rest; it has nothing to do on plain ASCII.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split())


def _clean_lower(text: str) -> str:
    return _clean_space(text).lower()
