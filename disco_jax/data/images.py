"""Encoded image files to RGB pictures, and the two transforms that make the model's square inputs.

Whatever a web crawl holds either becomes an RGB image or raises `BadExample` with one of these reasons: `image:empty`,
`image:not_an_image`, `image:bomb`, `image:truncated`, `image:broken`, `image:float`.
"""

import io
import math
import re
import warnings

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from disco_jax.data.examples import BadExample

MAX_PIXELS = 89_478_485  # 256 MiB of RGB, the size from which Pillow itself warns of a decompression bomb

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
"""Of the files that are taken for images, in lower case."""

# Only these: other Pillow formats are rare on the web, and some start programs (EPS) or fetch files.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_SIGNATURES = (
    (re.compile(rb"\xff\xd8\xff"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"BM"), "bmp"),
    (re.compile(rb"II[*+]\0|MM\0[*+]"), "tif"),
)
_LONGEST = 100  # long to short side beyond which only the middle is resized; 1 x 50,000 pixels would make a bomb
_IGNORE_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\."), 0)

_ORIENTATION = 0x0112  # the EXIF tag; its values are the ways to turn the picture upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def image_extension(data: bytes) -> str | None:
    """The file extension (`jpg png webp gif bmp tif`) that the first bytes tell, or None for anything else."""
    return next((extension for signature, extension in _SIGNATURES if signature.match(data)), None)


def decode_image(data: bytes, *, apply_exif: bool = True) -> Image.Image:
    """Decodes an image file into an RGB image.

    16-bit grey is scaled to 8 bits, transparency is composited on white, palettes are resolved, and of an animation the
    first frame is taken.

    Args:
        data: the encoded file: JPEG, PNG, WebP, GIF, BMP or TIFF.
        apply_exif: turn the picture upright as its EXIF orientation says (Pillow does so for TIFF in any case).

    Raises:
        BadExample: the file is empty, no image, cut off, broken, or has more than `MAX_PIXELS` pixels.
    """
    if not data:
        raise BadExample("image:empty", "the image file is empty")
    extension = image_extension(data)
    if extension is None:
        raise BadExample("image:not_an_image", f"the image file is of no kind known here, it starts with {data[:16]!r}")
    # Pillow warns of odd metadata in many a web image. catch_warnings is not safe in threads, and adding and removing
    # a filter each time would make Python repeat other warnings, so that one filter is added and stays.
    if _IGNORE_PILLOW not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadExample("image:bomb", f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
        image.load()
        rgb = _to_rgb(image)
        return _upright(image, rgb) if apply_exif else rgb
    except BadExample:
        raise
    except Image.DecompressionBombError as error:
        raise BadExample("image:bomb", str(error)) from error
    except UnidentifiedImageError as error:
        raise BadExample("image:broken", f"the header of the {extension} file is broken or cut off") from error
    except Exception as error:  # broken files make Pillow raise nearly anything
        reason = "image:truncated" if "truncated" in str(error) else "image:broken"
        raise BadExample(reason, f"{type(error).__name__}: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadExample("image:float", "floating-point pixels have no agreed range")
    if image.mode.startswith("I"):  # I;16, I;16B, ... and I, where Pillow keeps 16 bits as well
        values = np.asarray(image).clip(0, 65535).astype(np.int32)
        grey = ((values + 128) // 257).astype(np.uint8)
        if "transparency" in image.info:
            grey[values == image.info["transparency"]] = 255
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image.Image, rgb: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # unreadable EXIF says nothing about the pixels
        return rgb
    return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def train_transform(
    image: Image.Image,
    size: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = (0.9, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> UInt8[np.ndarray, "S S 3"]:
    """A random crop resized to a square, bicubic with antialiasing: torchvision's RandomResizedCrop.

    Args:
        image: RGB image.
        size: side S of the result, in pixels.
        rng: source of the crop's area, shape and place.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height; drawn uniformly in its logarithm.
    """
    box = _random_box(image.width, image.height, rng, scale, ratio)
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def _random_box(
    width: int, height: int, rng: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """The crop as (left, top, right, bottom); a centred one if ten tries do not fit into the image."""
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def eval_transform(image: Image.Image, size: int) -> UInt8[np.ndarray, "S S 3"]:
    """The centre of the image, its shorter side resized to `size` pixels: torchvision's Resize and CenterCrop, bicubic.

    Args:
        image: RGB image.
        size: side S of the result, in pixels.
    """
    shorter, longer = sorted(image.size)
    if longer > _LONGEST * shorter:
        image = _centre_crop(image, min(image.width, _LONGEST * shorter), min(image.height, _LONGEST * shorter))
    width, height = (int(size * side / shorter) for side in image.size)  # cut, not rounded, as torchvision does
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(_centre_crop(image, size, size))


def _centre_crop(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))
