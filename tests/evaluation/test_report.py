import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from disco_jax.evaluation.report import CAPTION_LINES, _printable, _smooth, _wrap, write_report

RIGHT_GREEN = (26, 152, 80)


def training_rows(steps):
    return [{"step": step, "loss": 5 / step, "logit_scale": 14.0 + step, "learning_rate": 1e-3} for step in steps]


def evaluation_row(step, split="eval"):
    ways = ("image_to_text", "text_to_image")
    recalls = {f"{split}/{way}/R@{k}": k / 20 for way in ways for k in (1, 5, 10)}
    return {"step": step, f"{split}/zero_shot/top1": 0.5, f"{split}/zero_shot/top5": 0.9} | recalls


def queries(captions, k=5, height=16, width=16):
    shape = (len(captions), k, height, width, 3)
    return captions, np.full(shape, 128, np.uint8), np.zeros((len(captions), k), bool)


def size(path):
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        return image.size


def green_pixels(path):
    with Image.open(path) as image:
        return int((np.asarray(image.convert("RGB")) == RIGHT_GREEN).all(axis=-1).sum())


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 0, "loss": 3.0}],
        [{"step": 1, "loss": None}],
        training_rows(range(1, 200)),
        [evaluation_row(10)],
        [*training_rows([10, 20]), evaluation_row(10), evaluation_row(20)],
        [*training_rows(range(1, 50)), evaluation_row(49), evaluation_row(49, "train"), evaluation_row(49, "日本")],
    ],
    ids=["none", "step 0", "not finite", "no evaluation", "no training", "few", "three splits"],
)
def test_histories_of_any_kind(tmp_path, history):
    path = tmp_path / "report.png"
    write_report(path, history, *queries(["a red circle", "a blue square"]))
    width, height = size(path)
    assert 1400 < width < 1700 and 700 < height < 2000


@pytest.mark.parametrize("k, height, width", [(5, 16, 16), (1, 8, 24), (8, 32, 8)])
def test_one_query_with_images_of_any_shape(tmp_path, k, height, width):
    path = tmp_path / "report.png"
    write_report(path, training_rows([1, 2]), *queries(["one"], k, height, width), title="Demo")
    assert size(path)[0] == 1560


def test_without_queries_there_are_only_curves(tmp_path):
    write_report(tmp_path / "curves.png", training_rows([1, 2]))
    write_report(tmp_path / "both.png", training_rows([1, 2]), *queries(["a", "b"]))
    assert 0 < size(tmp_path / "curves.png")[1] < size(tmp_path / "both.png")[1] - 400


def test_right_images_are_framed_in_green_and_wrong_ones_are_not(tmp_path):
    captions, images, right = queries(["a red circle"])
    write_report(tmp_path / "wrong.png", [], captions, images, right)
    right[0, 3] = True
    write_report(tmp_path / "one.png", [], captions, images, right)
    write_report(tmp_path / "all.png", [], captions, images, np.ones_like(right))
    one = green_pixels(tmp_path / "one.png")
    assert green_pixels(tmp_path / "wrong.png") == 0
    assert one > 1000
    assert green_pixels(tmp_path / "all.png") == pytest.approx(5 * one, rel=0.05)


def test_captions_of_any_characters_are_drawn_without_a_warning(tmp_path):
    captions = [
        "",
        "$x_2$ costs $5 \\frac{",
        "日本語 \U0001f9d1\u200d\U0001f680 العربية",
        "tab\tnew\nline \x00 \ufeff",
        "W" * 999,
    ]
    write_report(tmp_path / "report.png", [], *queries(captions), title="日本 $\\alpha")


def test_printable_puts_a_box_where_the_font_has_nothing():
    assert _printable("a\n \u200dcafé 日\U0001f9d1 ✓") == "a café □□ ✓"


@pytest.mark.parametrize("caption", ["short", "word " * 200, "W" * 300, "i" * 300, "□ " * 100])
def test_wrapped_captions_fit_their_column(caption):
    figure = Figure(figsize=(4, 4), dpi=120)
    FigureCanvasAgg(figure)
    label = figure.text(0, 0.5, "", fontsize=11.5)
    _wrap(label, caption, width=360.0)
    assert label.get_window_extent().width <= 360
    assert 1 <= len(label.get_text().splitlines()) <= CAPTION_LINES
    assert label.get_text().endswith("…") == (caption != "short")


def test_smoothing_keeps_a_constant_and_gaps_and_lowers_noise():
    constant = np.full(100, 3.0)
    constant[40] = np.nan
    np.testing.assert_allclose(_smooth(constant), constant)
    noise = np.random.default_rng(0).normal(size=1000)
    assert _smooth(noise).std() < 0.3
    np.testing.assert_array_equal(_smooth(noise[:5]), noise[:5])


def test_captions_without_images_are_refused(tmp_path):
    captions, images, right = queries(["a", "b"])
    with pytest.raises(ValueError, match="1 captions for 2 rows of images"):
        write_report(tmp_path / "report.png", [], captions[:1], images, right)
    with pytest.raises(ValueError, match="2 captions for 0 rows of images"):
        write_report(tmp_path / "report.png", [], captions)
