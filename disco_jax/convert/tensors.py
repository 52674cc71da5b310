"""Files of named tensors, as torch's ecosystem writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

Tensors: TypeAlias = dict[str, np.ndarray]

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
_WIDENED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))  # exactly


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file by name; float16 and bfloat16 become float32, which holds them exactly.

    A .pt, .pth or .bin file may hold them under "state_dict", with "module." before each name, as open_clip's own
    training checkpoints do. It needs torch, and only tensors are unpickled.

    Raises:
        ValueError: the file is damaged, of another kind, or holds something else than tensors.
        ImportError: torch is not installed.
    """
    if path.suffix in SAFETENSORS:
        try:
            tensors = safetensors.numpy.load_file(path)
        except (safetensors.SafetensorError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as a .safetensors file ({error}): get it again") from None
    elif path.suffix in PICKLED:
        tensors = _read_pickled(path)
    else:
        raise ValueError(f"{path} is of no known kind: its name must end in {', '.join(SAFETENSORS + PICKLED)}")
    return {name: value.astype(np.float32) if value.dtype in _WIDENED else value for name, value in tensors.items()}


def _read_pickled(path: Path) -> Tensors:
    try:
        import torch
    except ImportError:
        raise ImportError(f"reading {path} needs torch: pip install 'disco-jax[torch]'") from None
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, many lines long
        raise ValueError(
            f"{path} holds more than tensors, is a TorchScript archive (as OpenAI's files are) or is damaged "
            f"({type(error).__name__}): where you trust it, save its state_dict() as .safetensors with torch"
        ) from None
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not held:
        raise ValueError(f"{path} holds no tensors by name but a {type(held).__name__}: save a state_dict()")
    others = [name for name, value in held.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"{path} holds {others[0]!r}, which is no tensor: save a state_dict() alone")
    if all(name.startswith("module.") for name in held):
        held = {name.removeprefix("module."): value for name, value in held.items()}
    return {
        name: (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).numpy()
        for name, value in held.items()
    }


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Writes a .safetensors file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    contiguous = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in tensors.items()}
    try:
        safetensors.numpy.save_file(contiguous, temporary, metadata={"format": "pt"})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_tensors(tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Raises ValueError, naming it, for a tensor that is missing, unexpected, mis-shaped or not float32."""
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(f"{source} lacks the tensor {_first(missing)}: it is cut off, or no such model")
    unexpected = [name for name in tensors if name not in expected]
    if unexpected:
        raise ValueError(
            f"{source} holds the tensor {_first(unexpected)}, for which the CLIP of its other sizes has no place: "
            "only plain ViT CLIPs can be imported"
        )
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{source}: the tensor {name!r} has shape {tensor.shape}, the model needs {shape}")
        if tensor.dtype != np.float32:
            raise ValueError(f"{source}: the tensor {name!r} is {tensor.dtype}: save it as float32")


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} others)" if len(names) > 1 else "")
