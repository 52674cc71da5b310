import gzip
import html
import json
import pickle
import random
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import ftfy
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from disco_jax.data.tokenizer import Tokenizer, load_tokenizer

SOT, EOT = 49406, 49407
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "clip_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def clip() -> Tokenizer:
    return load_tokenizer()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text up to the end of text, which must be there once with nothing but zeros after it."""
    row = tokenizer([text], 77)[0].tolist()
    assert row[0] == tokenizer.sot_id and row.count(tokenizer.eot_id) == 1
    end = row.index(tokenizer.eot_id)
    assert not any(row[end + 1 :])
    return row[: end + 1]


# ---- the CLIP tokenizer


def test_golden_rows(clip):
    rows = clip([row["text"] for row in GOLDEN], 77)
    assert rows.shape == (len(GOLDEN), 77) and rows.dtype == np.int32
    for row, golden in zip(rows, GOLDEN, strict=True):
        # The file kept as many ids of each row as are not 0: one too few for "!?!?!?", as "!" is id 0.
        assert row[: np.count_nonzero(row)].tolist() == golden["ids"], golden["text"]
    assert ids_of(clip, "!?!?!?") == [SOT, 0, 37619, EOT]
    assert (clip.vocab_size, clip.sot_id, clip.eot_id) == (49408, SOT, EOT)


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # from open_clip 3.3.0: what its splitting without regard to case, and lower-casing, do to rare characters
        ("'\u017fx 'sx it'\u017f", [6, 129, 379, 343, 568, 343, 585, 6, 129, 379]),
        ("İstanbul", [328, 16384, 11231]),
        ("ΟΔΟΣ ΣΑΣ", [138, 123, 138, 112, 138, 123, 139, 480, 139, 225, 138, 109, 139, 480]),
        ("!\u0345?", [256, 286]),
        ("don't WE'LL i'm !'s ''s", [847, 713, 649, 1342, 328, 880, 13222, 338, 8445, 338]),
        ("½²Ⅷ٣४", [33613, 41175, 158, 227, 371, 149, 352, 7410, 359]),
        ("\x1b[31mred\x1b[0m", [736]),
        ("&#x27;s &amp;lt;3", [568, 283, 274]),
        ("\ud800 lone", [39802, 13576]),
    ],
)
def test_rare_characters(clip, text, ids):
    assert ids_of(clip, text) == [SOT, *ids, EOT]


@pytest.mark.parametrize("special", ["<|startoftext|>", "<|endoftext|>", "<start_of_text>", "<end_of_text>"])
def test_special_tokens_in_a_caption_are_text(clip, special):
    ids = ids_of(clip, f"a {special} b")
    assert len(ids) > 6 and not {SOT, EOT} & set(ids[1:-1])
    assert ids == [SOT, *reference_ids(f"a {special} b"), EOT]


@pytest.mark.parametrize("context_length", [2, 3, 8, 40])
def test_over_long_text_is_cut_with_end_of_text_last(clip, context_length):
    row = clip(["word " * 50], context_length)[0].tolist()
    assert row == [SOT, *[2653] * (context_length - 2), EOT]


def test_no_texts(clip):
    assert clip([], 77).shape == (0, 77)


def test_one_string_is_refused(clip):
    with pytest.raises(ValueError, match=r"wants a list.*\['a cat'\]"):
        clip("a cat", 77)


def test_short_context_is_refused(clip):
    with pytest.raises(ValueError, match="context_length 1 "):
        clip(["a cat"], 1)


def test_threads_and_pickling_change_nothing(clip):
    texts = [row["text"] for row in GOLDEN]
    want = clip(texts, 77)
    other = pickle.loads(pickle.dumps(clip))
    order = list(range(len(texts))) * 20
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: other([texts[i]], 77)[0], order))
    np.testing.assert_array_equal(rows, want[order])


# ---- against a plain BPE, on random text


@cache
def reference_tables() -> tuple[dict[tuple[str, str], int], dict[int, str], dict[str, int]]:
    packed = resources.files("disco_jax.data").joinpath("clip_bpe.txt.gz").read_bytes()
    merges = [tuple(line.split()) for line in gzip.decompress(packed).decode().splitlines()]
    assert len(merges) == 48894
    visible = [b for b in range(256) if 32 < b < 127 or (b > 160 and b != 173)]
    hidden = [b for b in range(256) if b not in visible]
    letters = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    names = [*letters.values()]
    ids = {name: i for i, name in enumerate([*names, *(n + "</w>" for n in names), *(a + b for a, b in merges)])}
    return {pair: rank for rank, pair in enumerate(merges)}, letters, ids


def reference_words(text: str) -> Iterator[str]:
    """Splits by hand: contractions, letters, one digit, anything else but space."""

    def kind(char: str) -> str:
        category = unicodedata.category(char)[0]
        return "space" if char.isspace() or char == "\u0345" else category if category in "LN" else "other"

    start = 0
    while start < len(text):
        contraction = next(
            (c for c in ("s", "\u017f", "t", "re", "ve", "m", "ll", "d") if text[start:].startswith("'" + c)), ""
        )
        end = start + 1 + len(contraction)
        if not contraction and kind(text[start]) in ("L", "other"):
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
        if kind(text[start]) != "space":
            yield text[start:end]
        start = end


def reference_ids(text: str) -> list[int]:
    ranks, letters, ids = reference_tables()
    text = " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()
    out = []
    for word in reference_words(text):
        parts = [letters[b] for b in word.encode()]
        parts[-1] += "</w>"
        while pairs := [p for p in pairwise(parts) if p in ranks]:
            first, second = min(pairs, key=lambda p: ranks[p])
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == (first, second):
                    parts[i : i + 2] = [first + second]
                i += 1
        out += [ids[part] for part in parts]
    return out


# Assigned characters only: Pythons differ in the Unicode version that names the rest.
ASSIGNED = st.characters(max_codepoint=0x1FFFF, exclude_categories=("Cn", "Cs"))
WORDS = st.sampled_from(
    [
        "photo's",
        "we'll",
        "'",
        "I'M",
        "&amp;",
        "&lt;",
        "&",
        ";",
        "#39",
        "Ã¶",
        "â€œ",
        "123",
        "!?",
        "<|endoftext|>",
        "\u017f",
        " ",
        "\t",
    ]
)
CAPTIONS = st.one_of(
    st.text(ASSIGNED, max_size=40),
    st.text(st.characters(max_codepoint=127), max_size=80),
    st.text("abcdest'lmrv ", max_size=80),
    st.lists(WORDS, max_size=20).map("".join),
)


@given(CAPTIONS)
@settings(max_examples=400, deadline=None)
def test_equals_a_plain_bpe(text):
    ids = [SOT, *reference_ids(text), EOT]
    assert shared_clip()([text], len(ids))[0].tolist() == ids


@given(st.lists(st.text(st.characters(exclude_categories=())), max_size=4), st.integers(2, 80))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_well_formed_rows(texts, context_length):
    rows = shared_clip()(texts, context_length)
    assert rows.shape == (len(texts), context_length)
    for row in rows.tolist():
        assert row[0] == SOT and row.count(SOT) == row.count(EOT) == 1
        assert not any(row[row.index(EOT) + 1 :])


@cache
def shared_clip() -> Tokenizer:
    return load_tokenizer()


# ---- a tokenizer.json


def hugging_face_clip(path: Path, *, special: bool = True) -> Path:
    """CLIP's tokenizer in the form in which Hugging Face keeps it."""
    ranks, _, ids = reference_tables()
    start, end = ("<|startoftext|>", SOT), ("<|endoftext|>", EOT)
    model = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids | dict([start, end]),
            merges=list(ranks),
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            unk_token=end[0],
        )
    )
    model.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model.post_processor = processors.RobertaProcessing(end, start, trim_offsets=False, add_prefix_space=False)
    added = [tokenizers.AddedToken(name, special=special, normalized=False) for name, _ in (start, end)]
    (model.add_special_tokens if special else model.add_tokens)(added)
    model.enable_truncation(20)
    model.enable_padding(length=20, pad_id=EOT)
    model.save(str(path))
    return path


def word_level(path: Path, template: str | None, added: tuple[str, ...] = ("[CLS]", "[SEP]")) -> Path:
    vocab = {"[UNK]": 1, "[CLS]": 7, "[SEP]": 9, "a": 2, "cat": 30}
    model = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens(list(added))
    if template is not None:
        names = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
    model.save(str(path))
    return path


def test_hugging_face_clip_gives_the_same_ids(clip, tmp_path):
    file = load_tokenizer(str(hugging_face_clip(tmp_path / "tokenizer.json")))
    texts = [row["text"] for row in GOLDEN]
    np.testing.assert_array_equal(file(texts, 77), clip(texts, 77))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(file))(texts, 16), clip(texts, 16))
    assert (file.vocab_size, file.sot_id, file.eot_id) == (49408, SOT, EOT)


def test_another_tokenizer_json(tmp_path):
    file = load_tokenizer(word_level(tmp_path / "t.json", "[CLS] $A [SEP]"))
    assert (file.vocab_size, file.sot_id, file.eot_id) == (31, 7, 9)
    assert file(["a cat", "a &amp; [SEP] cat", ""], 6).tolist() == [
        [7, 2, 30, 9, 0, 0],
        [7, 2, 1, 1, 1, 9],  # "&", and "[SEP]" as text, are unknown words here
        [7, 9, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("template", [None, "[CLS] $A", "$A [SEP]", "[SEP] $A [SEP]", "[CLS] $A [SEP] [SEP]"])
def test_file_without_a_start_and_an_end_of_text(tmp_path, template):
    with pytest.raises(ValueError, match=r"t\.json does not put a start-of-text.*post_processor") as error:
        load_tokenizer(word_level(tmp_path / "t.json", template))
    assert "\n" not in str(error.value)


def test_file_that_gives_a_special_id_to_text(tmp_path):
    with pytest.raises(ValueError, match=r"clip\.json takes .*endoftext.* mark them special"):
        load_tokenizer(hugging_face_clip(tmp_path / "clip.json", special=False))


@pytest.mark.parametrize("content", [b"", b"{}", b"not\njson", b"\xff\xfe\x00", b'{"model": {"type": "BPE"}}'])
def test_file_that_is_no_tokenizer_json(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read .*t\.json as a tokenizer\.json.*: give a") as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer file .*absent\.json: give a"):
        load_tokenizer(str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match=r"cannot read .*: give a"):
        load_tokenizer(str(tmp_path))
