"""The image rows of what must be right: each kind is decoded as it looks, every broken file is named."""

import io
import pickle
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from disco_jax.data import images
from disco_jax.data.examples import BadExample
from disco_jax.data.images import decode_image, eval_transform, image_extension, train_transform

GOLDEN = Path(__file__).parent.parent / "golden"
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
RED, WHITE = (255, 0, 0), (255, 255, 255)


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width=40, height=30):
    """A smooth picture whose four quarters differ, so that turns and flips show."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, x * y], -1) * 255).astype(np.uint8))


def png(width, height, depth, colour, rows, *chunks):
    """A PNG of a kind that Pillow reads but does not write; rows are the raw bytes without the filter byte."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunk(*c) for c in chunks) + body + chunk(b"IEND", b"")


def pixels(data, **options):
    image = decode_image(data, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def reason(data):
    with pytest.raises(BadExample) as error:
        decode_image(data)
    assert "\n" not in str(error.value)
    return error.value.reason


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("image_*.[pj]*g")), ids=lambda file: file.stem)
def test_eval_transform_equals_the_golden_arrays(file):
    golden = np.load(GOLDEN / f"{file.stem}_32px_chw.npy").transpose(1, 2, 0) * STD + MEAN
    ours = eval_transform(decode_image(file.read_bytes()), 32)
    assert ours.dtype == np.uint8
    np.testing.assert_allclose(ours / 255, golden, atol=1 / 255)


# ---- every kind of picture ----


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_files_come_back_exactly(kind):
    np.testing.assert_array_equal(pixels(encode(picture(), kind)), np.asarray(picture()))


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_files_come_back_nearly(kind, options):
    ours = pixels(encode(picture(), kind, quality=95, **options))
    np.testing.assert_allclose(ours.astype(int), np.asarray(picture()), atol=12)


RAMP = np.array([[0, 200, 257 * 100 + 3, 65535]], np.uint16)


def grey_16_bit(kind):
    if kind == "png":
        return encode(Image.fromarray(RAMP))
    if kind == "tiff":
        return encode(Image.fromarray(RAMP), "TIFF")
    if kind == "tiff big-endian":
        return encode(Image.frombytes("I;16B", (4, 1), RAMP.astype(">u2").tobytes()), "TIFF")
    return encode(Image.fromarray(RAMP.astype(np.int32)), "TIFF")  # mode I


@pytest.mark.parametrize("kind", ["png", "tiff", "tiff big-endian", "32-bit tiff"])
def test_16_bit_grey_is_scaled(kind):
    np.testing.assert_array_equal(pixels(grey_16_bit(kind))[0, :, 0], [0, 1, 100, 255])


def test_16_bit_colour_is_scaled():
    row = struct.pack(">6H", 65535, 0, 0, 0, 128 * 257, 65535)
    np.testing.assert_array_equal(pixels(png(2, 1, 16, 2, [row]))[0], [RED, (0, 128, 255)])


def transparent(mode):
    """Left: red (or black, in grey) and opaque; right: black and wholly transparent. With the colour on the left."""
    rgba = Image.fromarray(np.array([[[255, 0, 0, 255], [0, 0, 0, 0]]], np.uint8))
    grey = Image.fromarray(np.array([[[9, 255], [0, 0]]], np.uint8))
    if mode == "RGBA":
        return encode(rgba), RED
    if mode == "WEBP":
        return encode(rgba, "WEBP", lossless=True), RED
    if mode == "LA":
        return encode(grey), (9, 9, 9)
    if mode == "P with alphas":
        return encode(rgba.quantize(2)), RED
    if mode == "GIF":
        return encode(rgba, "GIF"), RED
    if mode == "P":
        image = Image.frombytes("P", (2, 1), bytes([1, 0]))
        image.putpalette([0, 0, 0, *RED])
        return encode(image, transparency=0), RED
    if mode == "RGB":
        return encode(Image.fromarray(np.array([[RED, (0, 0, 0)]], np.uint8)), transparency=(0, 0, 0)), RED
    if mode == "L":
        return encode(Image.fromarray(np.array([[9, 0]], np.uint8)), transparency=0), (9, 9, 9)
    if mode == "1":
        return encode(Image.fromarray(np.array([[False, True]])), transparency=1), (0, 0, 0)
    return png(2, 1, 16, 0, [struct.pack(">2H", 9 * 257, 70)], (b"tRNS", struct.pack(">H", 70))), (9, 9, 9)


@pytest.mark.parametrize("mode", ["RGBA", "WEBP", "LA", "P with alphas", "GIF", "P", "RGB", "L", "1", "I;16"])
def test_transparency_is_composited_on_white(mode):
    data, colour = transparent(mode)
    np.testing.assert_array_equal(pixels(data), [[colour, WHITE]])


def test_palettes_with_an_alpha_channel_are_composited_on_white():
    image = Image.fromarray(np.array([[[255, 0, 0, 255], [0, 0, 0, 0]]], np.uint8)).convert("PA")
    np.testing.assert_array_equal(np.asarray(images._to_rgb(image)), [[RED, WHITE]])  # no format writes these


def test_half_transparency_is_blended_with_white():
    data = encode(Image.new("RGBA", (1, 1), (0, 0, 0, 127)))
    np.testing.assert_array_equal(pixels(data), [[(128, 128, 128)]])


@pytest.mark.parametrize("mode", ["P", "1"])
def test_palette_and_1_bit_images_are_resized_as_colours(mode):
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    image = Image.fromarray(stripes).convert(mode)
    resized = eval_transform(decode_image(encode(image)), 32)
    assert np.all((resized > 64) & (resized < 192)), "the nearest neighbour would give 0 or 255"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
        8: lambda a: np.rot90(a, -1),
    }[orientation](np.asarray(picture()))
    data = encode(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    np.testing.assert_array_equal(pixels(data), np.asarray(picture()))
    np.testing.assert_array_equal(pixels(data, apply_exif=False), stored)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize("damaged", [slice(0, 4), slice(8, 48)], ids=["header", "entries"])
def test_unreadable_exif_does_not_cost_the_picture(damaged, kind, capfd):
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a maker with a long name"
    data = bytearray(encode(picture(), kind, exif=exif))
    start = data.index(b"MM\0*")
    for place in range(damaged.start, damaged.stop):
        data[start + place] = 255
    assert pixels(bytes(data)).shape == (30, 40, 3)
    assert capfd.readouterr().err == ""


def test_odd_metadata_warns_nobody():
    exif = Image.Exif()
    exif[0x010F] = "a maker with a long name"
    data = encode(picture(), "JPEG", exif=exif)
    cut = data.index(b"a maker") - data.index(b"Exif\0\0") - 6
    data = data.replace(struct.pack("<I", cut), struct.pack("<I", 10**6))  # the name now lies beyond the file
    with warnings.catch_warnings(), pytest.warns(UserWarning):
        warnings.simplefilter("always")
        Image.open(io.BytesIO(data)).getexif()
    assert pixels(data).shape == (30, 40, 3)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_decoded(kind):
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    np.testing.assert_allclose(pixels(encode(cmyk, kind))[0, 0].astype(int), RED, atol=6)


def test_adobe_inverted_cmyk_jpeg_is_decoded():
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    assert b"Adobe" in data  # Pillow writes what Photoshop does: inverted values with this marker
    np.testing.assert_allclose(pixels(data)[0, 0].astype(int), RED, atol=6)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_give_the_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    np.testing.assert_allclose(pixels(data)[4, 4].astype(int), RED, atol=4)


# ---- every kind of broken file ----


def test_empty_file():
    assert reason(b"") == "image:empty"


@pytest.mark.parametrize("data", [b"<!DOCTYPE html><html></html>", b"\0" * 1000, b"%!PS-Adobe-3.0 EPSF-3.0", b"x"])
def test_not_an_image(data):
    assert reason(data) == "image:not_an_image"
    assert image_extension(data) is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
    ],
)
def test_truncated_files(kind, options, capfd):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind, **options)
    for share in (0.05, 0.5, 0.9):
        assert reason(data[: int(len(data) * share)]) in ("image:truncated", "image:broken")
    assert kind == "WEBP" or reason(data[: int(len(data) * 0.9)]) == "image:truncated"
    assert capfd.readouterr().err == ""


def test_broken_header():
    assert reason(b"\xff\xd8\xff" + b"nothing of a JPEG" * 9) == "image:broken"
    assert reason(b"\x89PNG\r\n\x1a\n" + bytes(100)) == "image:broken"


def test_decompression_bombs(monkeypatch):
    bomb = png(60_000, 60_000, 1, 0, [b"\0"])  # 3.6 Gpixel, more than Pillow's own limit
    assert reason(bomb) == "image:bomb"
    large = png(10_000, 9_000, 1, 0, [b"\0"])  # Pillow would only warn
    assert reason(large) == "image:bomb"
    monkeypatch.setattr(images, "MAX_PIXELS", 40 * 30)
    assert pixels(encode(picture())).shape == (30, 40, 3)
    assert reason(encode(picture(41, 30))) == "image:bomb"


def test_float_pixels_are_refused():
    assert reason(encode(Image.new("F", (4, 4), 0.5), "TIFF")) == "image:float"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_no_damaged_byte_is_fatal(kind):
    data = encode(picture(), kind)
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            damaged[place] = rng.integers(256)
        try:
            assert decode_image(bytes(damaged)).mode == "RGB"
        except BadExample as error:
            assert error.reason.startswith("image:")


def test_bad_examples_survive_pickling():
    error = pickle.loads(pickle.dumps(BadExample("image:empty", "nothing there")))
    assert (error.reason, error.detail, str(error)) == ("image:empty", "nothing there", "nothing there")


def test_threads_decode_the_same():
    files = [encode(picture(40 + i, 30), "JPEG") for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(pool.map(pixels, files), map(pixels, files), strict=True):
            np.testing.assert_array_equal(one, other)


# ---- the transforms ----


def as_torchvision(image, size):
    """Resize and CenterCrop of torchvision on PIL images, written out from its documentation."""
    width, height = image.size
    if width <= height:
        image = image.resize((size, int(size * height / width)), Image.Resampling.BICUBIC)
    else:
        image = image.resize((int(size * width / height), size), Image.Resampling.BICUBIC)
    left, top = round((image.width - size) / 2.0), round((image.height - size) / 2.0)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize(
    "width_height", [(97, 60), (60, 97), (32, 32), (31, 45), (333, 32), (32, 33), (5, 3), (400, 7)]
)
def test_eval_transform_is_torchvisions(width_height):
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (*width_height[::-1], 3), dtype=np.uint8))
    np.testing.assert_array_equal(eval_transform(image, 32), as_torchvision(image, 32))


@pytest.mark.parametrize("width_height", [(1, 1), (2000, 1), (1, 2000), (60_000, 1), (1, 60_000), (3, 5000)])
def test_extreme_shapes_work_in_little_memory(width_height, monkeypatch):
    resize, areas = Image.Image.resize, []

    def spy(image, size, *args, **kwargs):
        areas.append(size[0] * size[1])
        return resize(image, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", spy)
    image = Image.new("RGB", width_height, (10, 200, 30))
    image.putpixel((0, 0), (11, 201, 31))
    expected = np.full((48, 48, 3), (10, 200, 30))
    np.testing.assert_allclose(eval_transform(image, 48).astype(int), expected, atol=1)
    for seed in range(5):
        ours = train_transform(image, 48, np.random.default_rng(seed))
        np.testing.assert_allclose(ours.astype(int), expected, atol=1)
    assert max(areas) <= 100 * 48 * 48


def test_extreme_shapes_keep_their_middle():
    image = Image.new("RGB", (50_001, 1))
    for x in range(24_990, 25_011):
        image.putpixel((x, 0), RED)
    np.testing.assert_array_equal(eval_transform(image, 16), np.broadcast_to(np.array(RED, np.uint8), (16, 16, 3)))


def test_train_transform_depends_on_the_generator_alone():
    one, same, other = (train_transform(picture(), 32, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert one.shape == (32, 32, 3) and one.dtype == np.uint8
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_train_crops_have_the_area_shape_and_places_asked_for():
    width, height, rng = 640, 480, np.random.default_rng(0)
    boxes = np.array([images._random_box(width, height, rng, (0.3, 0.5), (3 / 4, 4 / 3)) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    area, ratio = (right - left) * (bottom - top) / (width * height), (right - left) / (bottom - top)
    assert 0.297 < area.min() < 0.305 and 0.495 < area.max() < 0.503
    assert 0.745 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.34
    assert abs(np.log(ratio).mean()) < 0.02, "uniform in the logarithm"
    free_x, free_y = left / (width - (right - left)), top / (height - (bottom - top))
    for share in (free_x, free_y):
        assert share.min() < 0.01 and share.max() > 0.99 and abs(share.mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    ("width_height", "box"),
    [((1000, 100), (433, 0, 566, 100)), ((100, 1000), (0, 433, 100, 566)), ((130, 100), (0, 0, 130, 100))],
)
def test_a_crop_that_cannot_fit_is_the_centre(width_height, box):
    scale = (1.5, 1.5)  # more than there is: each of the ten tries fails
    assert images._random_box(*width_height, np.random.default_rng(0), scale, (3 / 4, 4 / 3)) == box


def test_train_transform_antialiases():
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    resized = train_transform(Image.fromarray(stripes), 32, np.random.default_rng(0))
    assert np.all(np.abs(resized[2:-2, 2:-2].astype(int) - 128) < 16)
