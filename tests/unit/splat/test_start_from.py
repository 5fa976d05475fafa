"""Splats to begin with: from files and from checkpoints of several programs, and what is wrong with those that fail."""

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


@pytest.mark.parametrize(
    ("suffix", "prefix", "key"),
    [
        (".ckpt", "_model.gauss_params.", "pipeline"),  # splatfacto and ours
        (".pt", "_model.gauss_params.", None),
        (".ckpt", "gauss_params.", None),  # of the model alone
    ],
)
@pytest.mark.parametrize("degree", [0, 2, 3])
def test_checkpoints(tmp_path: Path, colorful: Any, suffix: str, prefix: str, key: str | None, degree: int) -> None:
    tensors = colorful(9, degree).tensors()
    same(read_start(saved(tmp_path / f"a{suffix}", tensors, prefix, key)).gaussians, colorful(9, degree))


def test_notices_of_the_file_are_logged(tmp_path: Path, colorful: Any, capsys: pytest.CaptureFixture) -> None:
    export_splats(colorful(3), tmp_path / "[red].ply", SplatInfo())
    with (tmp_path / "[red].ply").open("ab") as stream:
        stream.write(b"more")
    read_start(tmp_path / "[red].ply")
    assert "[red].ply has 4 bytes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("fused", [True, False, None])
def test_a_filter_that_is_in_the_splats_is_taken_out(
    tmp_path: Path, colorful: Any, ring_cameras: Any, fused: bool | None
) -> None:
    views, splats = PinholeCameras.of(ring_cameras()), colorful(9)
    written = fuse(splats, smoothing_filter(splats.means, views)) if fused else splats
    export_splats(written, tmp_path / "a.ply", SplatInfo(filters_fused=fused))
    start = read_start(tmp_path / "a.ply")
    same(start.gaussians, written)
    same(start.prepare_gaussians(views, MipOptions()), splats)
    # A run without the filter keeps what it shows.
    same(start.prepare_gaussians(views, MipOptions(filter_3d=False)), written)


@pytest.mark.parametrize(
    ("options", "area"),
    [
        ({}, True),
        ({"regularization": "density"}, False),
        ({"regularization": "density", "mip": MipOptions(compensation="area")}, True),
    ],
)
def test_the_filter_of_a_run_is_compensated_as_the_run_did(
    tmp_path: Path, make_splat_model: Any, options: dict[str, Any], area: bool
) -> None:
    """With the compensation of volumes, the thin discs of planar are almost transparent."""
    model = make_splat_model(**options)
    torch.save({"pipeline": {f"_model.{name}": value for name, value in model.state_dict().items()}}, tmp_path / "a.pt")
    drawn = read_start(tmp_path / "a.pt").as_drawn()
    same(drawn.gaussians, fuse(model.gaussians, model.filter_3d, area))
    assert drawn.filter_3d is None


def test_a_filter_of_other_cameras_stays_and_the_log_says_so(
    tmp_path: Path, colorful: Any, ring_cameras: Any, capsys: pytest.CaptureFixture
) -> None:
    export_splats(colorful(9), tmp_path / "a.ply", SplatInfo(filters_fused=True))
    far = PinholeCameras.of(ring_cameras(radius=100.0))
    same(read_start(tmp_path / "a.ply").prepare_gaussians(far, MipOptions()), colorful(9))
    assert "--no-fused" in capsys.readouterr().out


def test_splats_of_another_place(tmp_path: Path, colorful: Any, ring_cameras: Any) -> None:
    splats = colorful(9)
    splats.means += 500
    export_splats(splats, tmp_path / "a.ply", SplatInfo())
    with pytest.raises(ConfigError, match=r" 9 .*--pipeline\.model\.start-frame capture"):
        read_start(tmp_path / "a.ply").prepare_gaussians(PinholeCameras.of(ring_cameras()), MipOptions())


class Unsafe:
    """Needs code of this module to be loaded."""


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04cut", {"pipeline": Unsafe()}])
def test_damaged_and_unsafe_checkpoints(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt.*would run code.*\.ply"):
        read_start(path)


@pytest.mark.parametrize("content", [{"pipeline": {"_model.field.weight": torch.ones(3)}}, {}, [1, 2], torch.ones(2)])
def test_checkpoints_of_other_methods(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt.*no Gaussians"):
        read_start(tmp_path / "a.ckpt")


@pytest.fixture
def folder(tmp_path: Path, colorful: Any) -> Path:
    """An output folder of 3DGS: as many Gaussians in each iteration as its number."""
    for count in (7, 30):
        (tmp_path / f"point_cloud/iteration_{count}").mkdir(parents=True)
        export_splats(colorful(count, 3), tmp_path / f"point_cloud/iteration_{count}/point_cloud.ply", SplatInfo())
    (tmp_path / "cameras.json").write_text("[]")
    (tmp_path / "cfg_args").write_text("Namespace()")
    return tmp_path


@pytest.mark.parametrize(("iteration", "count"), [(None, 30), (7, 7), (30, 30)])
def test_a_folder_of_3dgs(folder: Path, iteration: int | None, count: int) -> None:
    start = read_start(folder, iteration)
    assert len(start.gaussians) == count and start.frame == "capture"
    assert start.source == folder / f"point_cloud/iteration_{count}/point_cloud.ply"
    outputs = SimpleNamespace(dataparser_transform=torch.eye(4)[:3], dataparser_scale=2.0)
    for frame, scale in (("auto", 2), ("scene", 1)):
        moved = start.to_scene(outputs, frame).gaussians.means  # type: ignore[arg-type]
        torch.testing.assert_close(moved, scale * start.gaussians.means)


@pytest.mark.parametrize(
    ("name", "iteration", "message"),
    [
        ("none.ply", None, r"none\.ply"),
        ("point_cloud/iteration_7", None, "point_cloud/iteration_N"),
        ("", 8, r"iteration 8 .*start-iteration from 7, 30"),
        ("point_cloud/iteration_7/point_cloud.ply", 7, r"start-iteration .*\.ply is a file"),
    ],
)
def test_paths_that_lead_nowhere(folder: Path, name: str, iteration: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_start(folder / name, iteration)


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
def test_a_checkpoint_of_sugar(tmp_path: Path, colorful: Any, degree: int, in_folder: bool) -> None:
    state = {name: torch.nn.Parameter(value) for name, value in of_sugar(colorful(9, degree)).items()}
    torch.save({"state_dict": state, "epoch": 3, "train_losses": [0.1]}, tmp_path / "15000.pt")
    start = read_start(tmp_path if in_folder else tmp_path / "15000.pt")
    same(start.gaussians, colorful(9, degree))
    assert start.frame == "capture" and not start.fused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_surface_mesh_faces": torch.zeros(3, 3)}, "refined model"),
        ({"_scales": torch.zeros(9, 2)}, "refined model"),
        ({"_quaternions": None}, "lacks _quaternions"),
        ({"_quaternions": torch.zeros(9, 2)}, r"quats in .* have the shape \(9, 2\)"),
    ],
)
def test_checkpoints_of_sugar_that_cannot_be_used(
    tmp_path: Path, colorful: Any, change: dict[str, Any], message: str
) -> None:
    torch.save({"state_dict": of_sugar(colorful(9)) | change}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message):
        read_start(tmp_path / "a.pt")


@pytest.mark.parametrize(("frame", "moved"), [("auto", False), ("scene", False), ("capture", True)])
def test_splats_are_brought_to_the_scene(tmp_path: Path, colorful: Any, frame: Any, moved: bool) -> None:
    export_splats(colorful(9), tmp_path / "a.ply", SplatInfo())
    matrix = torch.tensor([[1.0, 0, 0, 0.5], [0, 0, 1, 0], [0, -1, 0, 0]])
    outputs = SimpleNamespace(dataparser_transform=matrix, dataparser_scale=2.0)
    start = read_start(tmp_path / "a.ply").to_scene(outputs, frame)
    means = colorful(9).means
    expected = 2 * torch.stack([means[:, 0] + 0.5, means[:, 2], -means[:, 1]], dim=1) if moved else means
    torch.testing.assert_close(start.gaussians.means, expected, atol=1e-5, rtol=0)
    assert start.frame == ("capture" if moved else "scene")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("features_rest", lambda value: torch.zeros(9, 7, 3), r"coefficients.* \(9, 7, 3\)"),
        ("features_rest", lambda value: torch.zeros(9, 3), r"coefficients.* \(9, 3\)"),
        ("features_rest", lambda value: value[:8], r"means .* \(9, 3\), .* 8 Gaussians"),
        ("opacities", lambda value: value[:, 0], r"opacities .* \(9,\)"),
        ("scales", lambda value: value[:, :2], r"scales .* \(9, 2\)"),
        ("quats", lambda value: value.sum(), r"quats .* \(\)"),
        ("quats", lambda value: 4, "lacks quats "),
        ("means", lambda value: value.clone().fill_(float("nan")), "9 of 9 .* means"),
        ("quats", lambda value: value / torch.tensor([0.0, 1, 1, 1]), "9 of 9 .* quats"),
        (None, lambda tensors: {name: value[:0] for name, value in tensors.items()}, "no Gaussians"),
        (None, lambda tensors: {name: tensors[name] for name in ("means", "scales")}, "lacks quats, opacities, "),
    ],
)
def test_checkpoints_with_values_that_cannot_be(
    tmp_path: Path, colorful: Any, name: str | None, change: Any, message: str
) -> None:
    tensors = colorful(9).tensors()
    tensors = change(tensors) if name is None else {**tensors, name: change(tensors[name])}
    with pytest.raises(UserError, match=message) as error:
        read_start(saved(tmp_path / "a.ckpt", tensors))
    assert "\n" not in str(error.value) and "a.ckpt" in str(error.value)
