"""Splats to begin with: from files and from checkpoints of several programs, and what is wrong with those that fail."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CheckpointError, ConfigError, UserError
from f3rm_ext.splat.files import SplatInfo, export_splats
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions, fuse, smoothing_filter
from f3rm_ext.splat.start_from import read_start


def saved(
    path: Path, tensors: dict[str, Any], prefix: str = "_model.gauss_params.", key: str | None = "pipeline"
) -> Path:
    state = {prefix + name: value for name, value in tensors.items()}
    torch.save(state if key is None else {"step": 3, key: state, "optimizers": {}}, path)
    return path


def same(one: Gaussians, two: Gaussians) -> None:
    for name, value in one.tensors().items():
        torch.testing.assert_close(value, two.tensors()[name], msg=name, atol=1e-5, rtol=1e-5)


def test_a_ply_file(tmp_path: Path, colorful: Callable[..., Gaussians]) -> None:
    export_splats(colorful(20, 3), tmp_path / "a.ply", SplatInfo())
    same(read_start(tmp_path / "a.ply").gaussians, colorful(20, 3))


@pytest.mark.parametrize("name", ["a.spz", "a.splat", "a.compressed.ply"])
def test_files_of_other_formats(tmp_path: Path, colorful: Callable[..., Gaussians], name: str) -> None:
    export_splats(colorful(20), tmp_path / name, SplatInfo())
    found = read_start(tmp_path / name).gaussians
    assert len(found) == 20 and found.means.std() == pytest.approx(float(colorful(20).means.std()), rel=0.01)


@pytest.mark.parametrize(
    ("suffix", "prefix", "key"),
    [
        (".ckpt", "_model.gauss_params.", "pipeline"),  # splatfacto and ours
        (".pt", "_model.gauss_params.", None),
        (".ckpt", "gauss_params.", None),  # of the model alone
    ],
)
@pytest.mark.parametrize("degree", [0, 2, 3])
def test_checkpoints(
    tmp_path: Path, colorful: Callable[..., Gaussians], suffix: str, prefix: str, key: str | None, degree: int
) -> None:
    tensors = colorful(9, degree).tensors()
    same(read_start(saved(tmp_path / f"a{suffix}", tensors, prefix, key)).gaussians, colorful(9, degree))


def test_notices_of_the_file_are_said(
    tmp_path: Path, colorful: Callable[..., Gaussians], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def read(path: Path) -> tuple[Gaussians, SplatInfo]:
        return colorful(3), SplatInfo(notices=("Field [red] is left out.",))

    monkeypatch.setattr("f3rm_ext.splat.start_from.read_splats", read)
    (tmp_path / "a.ply").touch()
    read_start(tmp_path / "a.ply")
    assert "Field [red] is left out." in capsys.readouterr().out


@pytest.mark.parametrize("fused", [True, False, None])
def test_a_filter_that_is_in_the_splats_is_taken_out(
    tmp_path: Path, colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any], fused: bool | None
) -> None:
    views, splats = PinholeCameras.of(ring_cameras()), colorful(9)
    written = fuse(splats, smoothing_filter(splats.means, *views)) if fused else splats
    export_splats(written, tmp_path / "a.ply", SplatInfo(filters_fused=fused))
    start = read_start(tmp_path / "a.ply")
    same(start.gaussians, written)
    same(start.prepare_gaussians(views, MipOptions()), splats)
    same(
        start.prepare_gaussians(views, MipOptions(filter_3d=False)), written
    )  # a run without the filter keeps what it shows


def test_a_filter_of_other_cameras_stays_and_that_is_said(
    tmp_path: Path, colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any], capsys: pytest.CaptureFixture
) -> None:
    export_splats(colorful(9), tmp_path / "a.ply", SplatInfo(filters_fused=True))
    far = PinholeCameras.of(ring_cameras(radius=100.0))
    same(read_start(tmp_path / "a.ply").prepare_gaussians(far, MipOptions()), colorful(9))
    assert "export them with --no-fused" in " ".join(capsys.readouterr().out.split())


def test_splats_of_another_place(
    tmp_path: Path, colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any]
) -> None:
    splats = colorful(9)
    splats.means += 500
    export_splats(splats, tmp_path / "a.ply", SplatInfo())
    with pytest.raises(ConfigError, match="No training camera sees any of the 9 Gaussians"):
        read_start(tmp_path / "a.ply").prepare_gaussians(PinholeCameras.of(ring_cameras()), MipOptions())


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .* to start from: give a \.ply"):
        read_start(tmp_path / "none.ply")
    with pytest.raises(ConfigError, match=r"no splats to start from in the folder .*point_cloud/iteration_N"):
        read_start(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "empty.ply", "half.ply"])
def test_files_that_hold_no_splats(tmp_path: Path, colorful: Callable[..., Gaussians], name: str) -> None:
    path = tmp_path / name
    path.write_bytes({"notes.txt": b"hello", "empty.ply": b"", "half.ply": b"ply\nformat binary_little"}[name])
    with pytest.raises(UserError, match=name) as error:
        read_start(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04cut"])
def test_damaged_checkpoints(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.ckpt cannot be read \(\w+\), it is damaged"):
        read_start(tmp_path / "a.ckpt")


class Unsafe:
    """Would be made again by code of the file."""


def test_checkpoints_that_need_code_are_refused(tmp_path: Path) -> None:
    torch.save({"pipeline": Unsafe()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"would run code: export it as \.ply"):
        read_start(tmp_path / "a.ckpt")


@pytest.mark.parametrize("content", [{"pipeline": {"_model.field.weight": torch.ones(3)}}, {}, [1, 2], torch.ones(2)])
def test_checkpoints_of_other_methods(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds no Gaussians: give one of sugar-ext, splatfacto or SuGaR"):
        read_start(tmp_path / "a.ckpt")


def a_folder(folder: Path, *iterations: int) -> Path:
    """An output folder of 3DGS: as many Gaussians in each iteration as its number."""
    for count in iterations:
        (folder / f"point_cloud/iteration_{count}").mkdir(parents=True)
        splats = Gaussians(
            torch.rand(count, 3),
            torch.zeros(count, 3) - 2,
            torch.ones(count, 4),
            torch.zeros(count, 1),
            torch.zeros(count, 3),
            torch.zeros(count, 15, 3),
        )
        export_splats(splats, folder / f"point_cloud/iteration_{count}/point_cloud.ply", SplatInfo())
    (folder / "cameras.json").write_text("[]")
    (folder / "cfg_args").write_text("Namespace()")
    return folder


@pytest.mark.parametrize(("iteration", "count"), [(None, 30), (7, 7), (30, 30)])
def test_a_folder_of_3dgs(tmp_path: Path, iteration: int | None, count: int) -> None:
    start = read_start(a_folder(tmp_path, 7, 30), iteration)
    assert len(start.gaussians) == count and start.frame == "capture"
    assert start.source == tmp_path / f"point_cloud/iteration_{count}/point_cloud.ply"


def test_an_iteration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no iteration 8 .*start-iteration from 7, 30, or"):
        read_start(a_folder(tmp_path, 30, 7), 8)
    with pytest.raises(ConfigError, match=r"selects an iteration in a folder, but .*\.ply is a file"):
        read_start(tmp_path / "point_cloud/iteration_7/point_cloud.ply", 7)


def of_sugar(splats: Gaussians) -> dict[str, torch.Tensor]:
    """The tensors as SuGaR keeps them."""
    return {
        "_points": splats.means,
        "_scales": splats.scales,
        "_quaternions": splats.quats,
        "all_densities": splats.opacities,
        "_sh_coordinates_dc": splats.features_dc[:, None],
        "_sh_coordinates_rest": splats.features_rest,
    }


@pytest.mark.parametrize("degree", [0, 3])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_checkpoint_of_sugar(
    tmp_path: Path, colorful: Callable[..., Gaussians], degree: int, in_folder: bool
) -> None:
    state = {name: torch.nn.Parameter(value) for name, value in of_sugar(colorful(9, degree)).items()}
    torch.save({"state_dict": state, "epoch": 3, "train_losses": [0.1]}, tmp_path / "15000.pt")
    start = read_start(tmp_path if in_folder else tmp_path / "15000.pt")
    same(start.gaussians, colorful(9, degree))
    assert start.frame == "capture" and not start.fused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_surface_mesh_faces": torch.zeros(3, 3)}, "SuGaR's refined model, .*: give the coarse one"),
        ({"_scales": torch.zeros(9, 2)}, "SuGaR's refined model"),
        ({"_quaternions": None}, "SuGaR's checkpoint .* lacks _quaternions"),
        ({"_quaternions": torch.zeros(9, 2)}, r"quats in .* have the shape \(9, 2\)"),
    ],
)
def test_checkpoints_of_sugar_that_cannot_be_used(
    tmp_path: Path, colorful: Callable[..., Gaussians], change: dict[str, Any], message: str
) -> None:
    torch.save({"state_dict": of_sugar(colorful(9)) | change}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message):
        read_start(tmp_path / "a.pt")


@pytest.mark.parametrize(("frame", "moved"), [("auto", False), ("scene", False), ("capture", True)])
def test_splats_are_brought_to_the_scene(
    tmp_path: Path, colorful: Callable[..., Gaussians], frame: Any, moved: bool
) -> None:
    export_splats(colorful(9), tmp_path / "a.ply", SplatInfo())
    matrix = torch.tensor([[1.0, 0, 0, 0.5], [0, 0, 1, 0], [0, -1, 0, 0]])
    outputs = SimpleNamespace(dataparser_transform=matrix, dataparser_scale=2.0)
    start = read_start(tmp_path / "a.ply").to_scene(outputs, frame)
    means = colorful(9).means
    expected = 2 * torch.stack([means[:, 0] + 0.5, means[:, 2], -means[:, 1]], dim=1) if moved else means
    torch.testing.assert_close(start.gaussians.means, expected, atol=1e-5, rtol=0)
    assert start.frame == ("capture" if moved else "scene")


def test_a_folder_of_3dgs_is_brought_to_the_scene_unasked(tmp_path: Path) -> None:
    outputs = SimpleNamespace(dataparser_transform=torch.eye(4)[:3], dataparser_scale=2.0)
    start = read_start(a_folder(tmp_path, 5))
    torch.testing.assert_close(start.to_scene(outputs, "auto").gaussians.means, 2 * start.gaussians.means)
    torch.testing.assert_close(start.to_scene(outputs, "scene").gaussians.means, start.gaussians.means)


def test_a_checkpoint_that_lacks_something(tmp_path: Path, colorful: Callable[..., Gaussians]) -> None:
    tensors = colorful(9).tensors()
    del tensors["quats"], tensors["opacities"]
    with pytest.raises(CheckpointError, match="lacks quats, opacities of its Gaussians"):
        read_start(saved(tmp_path / "a.ckpt", tensors))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "features_rest",
            lambda value: torch.zeros(9, 7, 3),
            r"have the shape \(9, 7, 3\), which belongs to no degree",
        ),
        ("features_rest", lambda value: torch.zeros(9, 3), r"have the shape \(9, 3\), which belongs to no degree"),
        ("features_rest", lambda value: value[:8], r"means in .* have the shape \(9, 3\), .* fit the 8 Gaussians"),
        ("opacities", lambda value: value[:, 0], r"opacities in .* have the shape \(9,\)"),
        ("scales", lambda value: value[:, :2], r"scales in .* have the shape \(9, 2\)"),
        ("quats", lambda value: value.sum(), r"quats in .* have the shape \(\)"),
        ("quats", lambda value: 4, "lacks quats of its Gaussians"),
        ("means", lambda value: value.clone().fill_(float("nan")), r"9 of 9 Gaussians .* NaN or infinite means"),
        ("quats", lambda value: value / torch.tensor([0.0, 1, 1, 1]), r"9 of 9 Gaussians .* NaN or infinite quats"),
    ],
)
def test_checkpoints_with_values_that_cannot_be(
    tmp_path: Path, colorful: Callable[..., Gaussians], name: str, change: Callable[..., torch.Tensor], message: str
) -> None:
    tensors = colorful(9).tensors()
    tensors[name] = change(tensors[name])
    with pytest.raises(UserError, match=message) as error:
        read_start(saved(tmp_path / "a.ckpt", tensors))
    assert "\n" not in str(error.value) and "a.ckpt" in str(error.value)


def test_a_checkpoint_without_a_single_gaussian(tmp_path: Path, colorful: Callable[..., Gaussians]) -> None:
    tensors = colorful(9)[:0].tensors()
    with pytest.raises(UserError, match=r"no Gaussians in .*a\.ckpt"):
        read_start(saved(tmp_path / "a.ckpt", tensors))
