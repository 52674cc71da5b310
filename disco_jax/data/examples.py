"""What a data source gives, and what it raises when an example cannot be used."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class BadExample(ValueError):
    """An example to drop and count: broken image, missing caption, cut-off shard.

    Attributes:
        reason: short slug that the dropped examples are counted by, for instance `"image:truncated"`.
        detail: what was found, in words; also `str(error)`.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)  # both in args, so that the error survives pickling between workers
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True)
class Example:
    """One image with its captions as stored, before any decoding.

    Attributes:
        key: name of the example, unique within its source; used in logs.
        image: the encoded image file.
        caption: the caption as stored; bytes are UTF-8, None means there is none.
        label: class index where the source knows one.
        other_captions: further captions of the same image. Training takes `caption`, retrieval all of them.
    """

    key: str
    image: bytes
    caption: bytes | str | None
    label: int | None = None
    other_captions: tuple[bytes | str, ...] = ()


@runtime_checkable
class ExampleSource(Protocol):
    """Random access to examples; reads are thread-safe and the source can be pickled."""

    def __len__(self) -> int:
        """Number of examples, the bad ones included."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Reads one example; raises `BadExample` when it cannot be used."""
        ...
