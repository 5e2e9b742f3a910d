"""Boxes lie in the image and cover what they should; pixels are the file's, however much of it was decoded."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elle.data.decoding import AREA, DRAWS, OpenImage, centre_box, pixel_box, random_box, resize
from elle.errors import InputError

from .photographs import photograph

sides = st.integers(1, 3000)
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # it is only read


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "photo.jpg"
    photograph(np.random.default_rng(0), 320, 240).save(file, quality=95)
    return file


@given(width=sides, height=sides, seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_a_random_box_lies_in_the_image_and_keeps_to_the_shapes_allowed(width, height, seed):
    left, top, right, bottom = random_box(np.random.default_rng(seed).random(DRAWS), width, height)
    assert 0 <= left < right <= width + 1e-9
    assert 0 <= top < bottom <= height + 1e-9
    ratio = (right - left) / (bottom - top)
    assert 0.74 < ratio < 1.35


def test_random_boxes_cover_all_shares_alike_and_reach_every_corner():
    draw = np.random.default_rng(0)
    boxes = np.array([random_box(draw.random(DRAWS), 400, 400) for _ in range(4000)])
    share = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 400**2
    assert share.min() == pytest.approx(AREA[0], abs=0.01)
    assert np.quantile(share, 0.5) == pytest.approx(0.5, abs=0.05)  # above 0.9 some shapes do not fit and are redrawn
    ratio = np.log((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1]))
    assert np.quantile(ratio, [0, 0.25, 0.5]) == pytest.approx([-np.log(4 / 3), -np.log(4 / 3) / 2, 0], abs=0.03)
    assert (boxes[:, :2].min(0) < 2).all()
    assert (boxes[:, 2:].max(0) > 398).all()


@pytest.mark.parametrize("shape", [(1000, 10), (10, 1000)])
def test_an_image_too_long_for_any_box_gives_its_middle(shape):
    left, top, right, bottom = random_box(np.full(DRAWS, 0.99), *shape)
    assert (left + right, top + bottom) == pytest.approx(shape)
    assert min(right - left, bottom - top) == 10


@pytest.mark.parametrize(
    ("size", "width", "height", "box"),
    [
        (224, 500, 400, (75, 25, 425, 375)),  # 256 / 400 of it, then 224 in the middle
        (224, 256, 256, (16, 16, 240, 240)),
        (224, 240, 300, (8, 38, 232, 262)),  # between 224 and 256: not resized
        (64, 64, 64, (0, 0, 64, 64)),
        (224, 100, 120, (0, 10, 100, 110)),  # too small: the whole short side, enlarged
    ],
)
def test_the_middle_is_cut_out_as_imagenet_is_evaluated(size, width, height, box):
    assert centre_box(size, width, height) == pytest.approx(box)


@given(box=st.tuples(*4 * [st.floats(0, 1)]), shown=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_a_box_of_whole_pixels_is_never_empty_and_never_outside(box, shown):
    left, right = sorted(box[::2])
    top, bottom = sorted(box[1::2])
    found = pixel_box((400 * left, 300 * top, 400 * right, 300 * bottom), (400, 300), shown)
    assert 0 <= found[0] < found[2] <= shown[0]
    assert 0 <= found[1] < found[3] <= shown[1]


@pytest.mark.parametrize("size", [(32, 32), (100, 100), (200, 180)])
def test_resizing_agrees_with_pillow(size):
    pixels = np.asarray(photograph(np.random.default_rng(1), 120, 90))
    into = np.empty((size[1], size[0], 3), np.uint8)
    resize(pixels.copy(), into)
    expected = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(into - expected).max() <= 1


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("black_from", [240, 50])
@pytest.mark.parametrize("box", [(10, 5, 110, 85), (0, 0, 320, 100), (100, 20, 300, 240), (0, 0, 320, 240)])
def test_decoding_the_upper_rows_alone_gives_the_same_pixels(tmp_path, box, black_from, progressive):
    path = tmp_path / "photo.jpg"
    photo = photograph(np.random.default_rng(0), 320, 240)
    photo.paste("black", (0, black_from, 320, 240))  # as a film's margin below the picture
    photo.save(path, quality=95, progressive=progressive)
    whole, part = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8)
    OpenImage(str(path)).resized(box, whole)
    OpenImage(str(path)).resized(box, part, whole=False)
    np.testing.assert_array_equal(part, whole)
    assert whole.any()


def test_a_black_photograph_is_black_and_not_damaged(tmp_path):
    path = tmp_path / "night.jpg"
    Image.new("RGB", (200, 200)).save(path)
    into = np.ones((32, 32, 3), np.uint8)
    OpenImage(str(path)).resized((0, 0, 100, 100), into, whole=False)
    assert not into.any()


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path):
    path = tmp_path / "large.jpg"
    photo = photograph(np.random.default_rng(0), 1280, 960)
    photo.save(path, quality=95)
    image = OpenImage(str(path))
    into = np.empty((64, 64, 3), np.uint8)
    image.resized((0, 0, 960, 960), into)
    assert image.image.size == (160, 120)  # an eighth: 120 pixels are left for 64
    expected = photo.crop((0, 0, 960, 960)).resize((64, 64), Image.Resampling.BILINEAR)
    assert np.abs(into.astype(int) - np.asarray(expected)).max() <= 6


@pytest.mark.parametrize(("mode", "suffix"), [("RGB", "png"), ("RGBA", "webp"), ("L", "jpg"), ("CMYK", "jpg")])
@pytest.mark.parametrize("whole", [True, False])
def test_every_format_and_colour_model_gives_three_channels(tmp_path, mode, suffix, whole):
    path = tmp_path / f"photo.{suffix}"
    photograph(np.random.default_rng(0), 90, 70).convert(mode).save(path)
    into = np.zeros((32, 32, 3), np.uint8)
    OpenImage(str(path)).resized((5, 5, 65, 65), into, whole)
    assert into.min() > 0


@pytest.mark.parametrize("box", [(0, 0, 320, 240), (0, 150, 100, 240)])
def test_a_truncated_jpeg_is_named_whether_or_not_all_of_it_was_wanted(path, box):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for whole in (True, False):
        with pytest.raises(InputError, match=r"photo\.jpg: .*truncated.*; replace or remove it; `elle data ch"):
            OpenImage(str(path)).resized(box, np.empty((16, 16, 3), np.uint8), whole)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xe0" + bytes(100)])
def test_what_is_no_image_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"photo\.jpg"):
        OpenImage(str(path)).resized((0, 0, 1, 1), np.empty((16, 16, 3), np.uint8))


@pytest.mark.parametrize("whole", [True, False])
def test_a_header_without_a_picture_is_named(path, whole):
    path.write_bytes(path.read_bytes().replace(b"\xff\xda", b"\xff\xd9"))
    with pytest.raises(InputError, match=r"photo\.jpg"):
        OpenImage(str(path)).resized((0, 0, 9, 9), np.empty((16, 16, 3), np.uint8), whole)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jpg: cannot be read"):
        OpenImage(str(tmp_path / "gone.jpg"))


def test_a_bomb_is_refused(path, monkeypatch):
    monkeypatch.setattr("elle.data.decoding.MAX_PIXELS", 1000)
    monkeypatch.setattr("elle.data.folder.MAX_PIXELS", 1000)
    with pytest.raises(InputError, match="320 x 240 pixels, more than the 1000 allowed"):
        OpenImage(str(path))


@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_byte_gives_pixels_or_an_error_that_names_the_file(place, value, tmp_path_factory):
    buffer = io.BytesIO()
    photograph(np.random.default_rng(0), 64, 48).save(buffer, "JPEG")
    raw = bytearray(buffer.getvalue())
    raw[place % len(raw)] = value
    path = tmp_path_factory.mktemp("damaged") / "photo.jpg"
    path.write_bytes(raw)
    problems = []
    for whole in (True, False):
        try:
            image = OpenImage(str(path))
            box = (0.0, 0.0, image.width / 2, image.height / 2)
            image.resized(box, np.empty((16, 16, 3), np.uint8), whole)
        except InputError as problem:
            problems.append(str(problem))
    assert all("photo.jpg" in problem for problem in problems)
