"""Exposures from EXIF, with all that cameras write there."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from f3rm_ext.capture.exposures import exposure_stops

TIME_S, F_NUMBER, ISO = 0x829A, 0x829D, 0x8827


def photo(path: Path, grey: int = 100, **tags: Any) -> Path:
    exif = Image.Exif()
    exif[0x010F] = "Maker"  # Pillow writes no EXIF of details alone into PNG
    names = {"time": TIME_S, "f": F_NUMBER, "iso": ISO}
    exif.get_ifd(0x8769).update({names[name]: value for name, value in tags.items()})
    Image.fromarray(np.full((16, 24, 3), grey, np.uint8)).save(path, exif=exif)
    return path


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_stop_is_twice_the_light(tmp_path: Path, suffix: str) -> None:
    tags = [
        {"time": 0.01, "f": 2.0, "iso": 100},
        {"time": 0.02, "f": 2.0, "iso": 100},
        {"time": 0.01, "f": 2.0, "iso": 400},
        {"time": 0.01, "f": 4.0, "iso": 100},
    ]
    first, *others = exposure_stops([photo(tmp_path / f"{i}.{suffix}", **tag) for i, tag in enumerate(tags)])
    assert first == pytest.approx(math.log2(0.01 * 100 / 4), abs=1e-4)
    assert [other - first for other in others if other is not None] == pytest.approx([1, 2, -2], abs=1e-4)


@pytest.mark.parametrize(
    "odd",
    [
        {"time": 0.0, "iso": 100},
        {"time": IFDRational(1, 0), "iso": 100},
        {"time": IFDRational(0, 0), "iso": 100},
        {"time": "1/60", "iso": 100},
        {"time": 0.01},
        {"time": 0.01, "iso": 0},
        {"iso": 100},
        {},
    ],
)
def test_what_says_nothing_is_unknown(tmp_path: Path, odd: dict[str, Any]) -> None:
    assert exposure_stops([photo(tmp_path / "a.jpg", **odd)]) == [None]


def test_several_values_of_iso_are_one(tmp_path: Path) -> None:
    (one, two) = exposure_stops(
        [photo(tmp_path / "a.jpg", time=0.01, iso=200), photo(tmp_path / "b.jpg", time=0.01, iso=(200, 0))]
    )
    assert one == two is not None


def test_lenses_without_contacts_have_one_aperture(tmp_path: Path) -> None:
    dumb = [photo(tmp_path / "a.jpg", time=0.01, iso=100, f=0.0), photo(tmp_path / "b.jpg", time=0.02, iso=100)]
    dark, bright = exposure_stops(dumb)
    assert dark is not None and bright is not None and bright - dark == pytest.approx(1, abs=1e-4)
    known = photo(tmp_path / "c.jpg", time=0.01, iso=100, f=8.0)
    values = exposure_stops([*dumb, known])
    assert values[:2] == [None, None] and values[2] is not None


def test_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    text, cut = tmp_path / "a.jpg", tmp_path / "b.jpg"
    text.write_text("no photo")
    whole = photo(tmp_path / "c.jpg", time=0.01, iso=100)
    cut.write_bytes(whole.read_bytes()[:60])
    paths = [text, cut, tmp_path / "missing.jpg"]
    assert exposure_stops(paths) == [None] * 3
