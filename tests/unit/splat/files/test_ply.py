"""Splats as PLY: exact, and the layout that other programs know."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
VALUES = {
    **{"x": 1.5, "y": -2.0, "z": 0.25, "nx": 9.0, "ny": 9.0, "nz": 9.0},
    **{"f_dc_0": 0.1, "f_dc_1": 0.2, "f_dc_2": 0.3, "opacity": -1.25},
    **{"scale_0": -3.0, "scale_1": -4.0, "scale_2": -5.0},
    **{"rot_0": 2.0, "rot_1": 0.5, "rot_2": -0.5, "rot_3": 0.125},
}
"""A Gaussian without SH beyond the first."""
REST = {f"f_rest_{i}": 100.0 + i for i in range(9)}


def header(properties: Sequence[str], count: int = 1, kind: str = "binary_little_endian", *lines: str) -> bytes:
    text = ["ply", f"format {kind} 1.0", *lines, f"element vertex {count}"]
    text += [name if " " in name else f"property float {name}" for name in properties]
    return ("\n".join([*text, "end_header"]) + "\n").encode()


def file_of(path: Path, values: dict[str, float], *lines: str) -> Path:
    """A PLY file of one Gaussian, made byte by byte."""
    path.write_bytes(
        header(list(values), 1, "binary_little_endian", *lines) + struct.pack(f"<{len(values)}f", *values.values())
    )
    return path


def expected() -> dict[str, list[float]]:
    return {
        "means": [1.5, -2.0, 0.25],
        "scales": [-3.0, -4.0, -5.0],
        "quats": [2.0, 0.5, -0.5, 0.125],
        "opacities": [-1.25],
        "features_dc": [0.1, 0.2, 0.3],
    }


def assert_expected(gaussians: Gaussians) -> None:
    for name, value in expected().items():
        torch.testing.assert_close(gaussians.tensors()[name], torch.tensor([value]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("count", "degree", "dtype"),
    [
        ((1 << 16) + 7, 0, torch.float32),  # more than a chunk
        (40, 1, torch.float32),
        (40, 2, torch.float32),
        (40, 3, torch.float32),
        (40, 3, torch.float16),
    ],
)
def test_round_trip_is_exact(
    count: int, degree: int, dtype: torch.dtype, make: Make, assert_same: Any, tmp_path: Path
) -> None:
    gaussians = make(count, degree)
    gaussians.features_rest = gaussians.features_rest.to(dtype)
    written = write_splats(tmp_path / "a.ply", gaussians, SplatInfo(render_mode="mip", filters_fused=True))
    found, info = read_splats(tmp_path / "a.ply")
    gaussians.features_rest = gaussians.features_rest.float()
    assert_same(found, gaussians)
    assert info == SplatInfo("ply", "mip", True, degree, count) == written


def test_bytes_of_a_written_file(tmp_path: Path) -> None:
    """Colours of the SH beyond the first are one after the other, all of red first."""
    rest = torch.arange(9.0).reshape(1, 3, 3).transpose(1, 2) + 100
    gaussians = Gaussians(*(torch.tensor([value]) for value in expected().values()), rest)
    write_splats(tmp_path / "a.ply", gaussians, SplatInfo(render_mode="mip", filters_fused=True, comments=("hello",)))
    values = {**VALUES, **dict.fromkeys(("nx", "ny", "nz"), 0.0)}
    order = ["x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2", *REST, "opacity"]
    order += ["scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"]
    lines = ("comment hello", "comment filter_3d: fused", "comment SplatRenderMode: mip")
    wanted = header(order, 1, "binary_little_endian", *lines)
    wanted += struct.pack(f"<{len(order)}f", *({**values, **REST}[name] for name in order))
    assert (tmp_path / "a.ply").read_bytes() == wanted


def test_properties_in_any_order(tmp_path: Path) -> None:
    shuffled = dict(sorted({**VALUES, **REST}.items(), key=lambda item: item[0][::-1]))
    assert list(shuffled) != list({**VALUES, **REST})
    gaussians, info = read_splats(file_of(tmp_path / "a.ply", shuffled))
    assert_expected(gaussians)
    assert gaussians.features_rest[0].T.tolist() == [[100, 101, 102], [103, 104, 105], [106, 107, 108]]
    assert info == SplatInfo("ply", None, None, 1, 1)


ROW = struct.pack(f"<{len(VALUES)}f", *VALUES.values())
FACES = b"element face 1\nproperty list uchar int vertex_indices\nend_header"
MIXED_NAMES = [f"property {'double' if i % 2 else 'float'} {name}" for i, name in enumerate(VALUES)]
MIXED = header(MIXED_NAMES, 1, "binary_big_endian")
AROUND = header(list(VALUES), 1, "binary_little_endian", "element camera 2", "property short id")
AROUND = AROUND.replace(b"end_header", FACES) + struct.pack("<2h", 1, 2) + ROW + b"\x03" + bytes(12)
TEXT = header(list(VALUES), 2, "ascii", "element camera 1", "property int id")
LAYOUTS = {
    "line ends of Windows": header(list(VALUES)).replace(b"\n", b"\r\n") + ROW,
    "other numbers, big end first": MIXED + struct.pack(">" + ("fd" * len(VALUES))[: len(VALUES)], *VALUES.values()),
    "elements before and after": AROUND,
    "text": TEXT + "\n\n".join(["5", *[" ".join(map(str, VALUES.values()))] * 2, ""]).encode(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    (tmp_path / "a.ply").write_bytes(LAYOUTS[layout])
    gaussians, info = read_splats(tmp_path / "a.ply")
    assert info.count == len(gaussians) == (2 if layout == "text" else 1)
    for index in range(len(gaussians)):
        assert_expected(gaussians[index : index + 1])


def test_notices_of_extra_properties_and_bytes(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.ply", {**{f"semantic_{i}": 0.0 for i in range(8)}, **VALUES})
    path.write_bytes(path.read_bytes() + b"123")
    gaussians, info = read_splats(path)
    assert_expected(gaussians)
    properties, trailing = info.notices
    assert (
        properties.endswith(", ".join(f"semantic_{i}" for i in range(6)) + " and 2 more.") and " 3 bytes " in trailing
    )


def test_colors_in_bytes(tmp_path: Path) -> None:
    """As ``ns-export gaussian-splat --ply-color-mode rgb`` writes them."""
    values = {name: value for name, value in VALUES.items() if not name.startswith("f_dc")}
    properties = [*values, "property uchar red", "property uchar green", "property uchar blue"]
    data = struct.pack(f"<{len(values)}f3B", *values.values(), 255, 51, 0)
    (tmp_path / "a.ply").write_bytes(header(properties) + data)
    gaussians, _ = read_splats(tmp_path / "a.ply")
    found = gaussians.features_dc[0] * 0.28209479177387814 + 0.5
    torch.testing.assert_close(found, torch.tensor([1.0, 0.2, 0.0]), rtol=0, atol=1e-6)


def without(*names: str) -> dict[str, float]:
    return {name: value for name, value in {**VALUES, **REST}.items() if name not in names}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (without("opacity"), "lacks opacity,"),
        (without("rot_3", "scale_1"), "lacks scale_1, rot_3,"),
        (without("f_dc_1"), "lacks f_dc_1,"),
        (without("f_rest_4"), "lacks f_rest_4 "),
        (without("f_rest_8"), r"8 SH coefficients .* 0 to 3"),
        ({**VALUES, **{f"f_rest_{i}": 0.0 for i in range(72)}}, r"has 72 SH .*have 0, 9, 24, 45"),
        ({"x": 0.0, "y": 0.0, "z": 0.0}, r"point cloud .*lacks opacity"),
        ({"u": 0.0}, "point cloud"),
    ],
)
def test_properties_that_are_not_those_of_splats(values: dict[str, float], message: str, tmp_path: Path) -> None:
    with pytest.raises(SplatFileError, match=message):
        read_splats(file_of(tmp_path / "a.ply", values))


def test_mesh(tmp_path: Path) -> None:
    trimesh = pytest.importorskip("trimesh")
    trimesh.creation.box().export(tmp_path / "a.ply")
    with pytest.raises(SplatFileError, match=r"a\.ply.*mesh"):
        read_splats(tmp_path / "a.ply")


def test_cut_short(make: Make, assert_refused: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "b.ply"
    write_splats(path, make(count=10, degree=0), SplatInfo())
    whole = path.read_bytes()
    rows, row = len(whole) - 10 * 17 * 4, 17 * 4
    for size, words in (
        (len(whole) - 1, "9 of 10"),
        (rows + 4 * row, "4 of 10"),
        (rows + 4 * row - 1, "3 of 10"),
        (rows, "0 of 10"),
        (rows - 20, "header"),
    ):
        assert_refused("b.ply", whole[:size], rf"b\.ply.*cut short.*{words}|{words}.*cut short")
    assert_refused("b.ply", header(list(VALUES), 10**15), "0 of 1000000000000000")  # takes no memory


ASCII = header(list(VALUES), 1, "ascii")
LISTS = header(list(VALUES), 1, "binary_little_endian", "element path 1", "property list uchar int nodes")
BAD = {
    "too few numbers": (ASCII + b"1 2 3", "vertex .*17 numbers"),
    "no numbers": (ASCII + b"a " * 17, "vertex .*17 numbers"),
    "too many numbers": (ASCII + b"1 " * 18, "vertex .*17 numbers"),
    "no rows": (ASCII, "cut short, with 0 of 1 "),
    "no end": (b"ply\nformat ascii 1.0\n" + b"comment a\n" * 20_000, "header has no end"),
    "no format": (b"ply\nelement vertex 1\nend_header\n", "no format"),
    "lists": (LISTS + bytes(1000), "lists in or before its element vertex"),
    **{
        lines: (f"ply\nformat ascii 1.0\n{lines}\nend_header\n".encode(), f"header.*'{lines.splitlines()[-1]}'")
        for lines in (
            "property float x",
            "element vertex many",
            "element vertex -1",
            "element vertex 1\nelement vertex 1",
            "element vertex 1\nproperty float x\nproperty float x",
            "element vertex 1\nproperty quad x",
            "element vertex 1\nproperty float",
            "format middle_endian 1.0",
            "nonsense",
        )
    },
}


@pytest.mark.parametrize("what", BAD)
def test_headers_and_rows_that_cannot_be_read(what: str, assert_refused: Callable[..., None]) -> None:
    assert_refused("a.ply", *BAD[what])
