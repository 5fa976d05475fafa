"""COLMAP's made-up scenes as ground truth for ray maps, recovery and metrics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.sfm.cameras import PYTORCH3D_SIGNS, CameraSet
from f3rm_ext.sfm.database import FeatureDatabase
from f3rm_ext.sfm.mapping import solve
from f3rm_ext.sfm.metrics import compare_poses
from f3rm_ext.sfm.rays import to_homogeneous
from f3rm_ext.sfm.recovery import recover_cameras

pycolmap = pytest.importorskip("pycolmap")
Poses = tuple[np.ndarray, np.ndarray]
CELLS = 16


def make_scene(path: Path, camera_params: list[float], num_frames: int = 8) -> Any:
    """A scene, whose matches are in the database ``path``."""
    pycolmap.set_random_seed(0)
    settings = pycolmap.SyntheticDatasetOptions(
        num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=num_frames, num_points3D=150, camera_width=1024,
        camera_height=768, camera_model_id=pycolmap.CameraModelId.PINHOLE, camera_params=camera_params,
    )  # fmt: skip
    with pycolmap.Database.open(path) as opened:
        return pycolmap.synthesize_dataset(settings, opened)


def poses_of(model: Any) -> Poses:
    """Rotations (camera to world) and centres, by name of the photo."""
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    rotations = np.stack([image.cam_from_world().rotation.matrix().T for image in images])
    return rotations, np.stack([image.projection_center() for image in images])


def colmaps_maps(model: Any) -> torch.Tensor:
    """Ray maps made with COLMAP's cameras alone, in the axes and the frame of the first camera, PyTorch3D's."""
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    first = images[0].cam_from_world()
    camera = model.camera(images[0].camera_id)
    xs, ys = ((np.arange(CELLS) + 0.5) * size / CELLS for size in (camera.width, camera.height))
    pixels = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    depth = np.random.default_rng(0).uniform(3, 6, (len(images), len(pixels), 1))
    maps = []
    for image, depths in zip(images, depth, strict=True):
        local = np.concatenate([camera.cam_from_img(pixels), np.ones((len(pixels), 1))], axis=1) * depths
        to_first = first * image.cam_from_world().inverse()
        ends = (to_first * local) * PYTORCH3D_SIGNS
        starts = np.broadcast_to(to_first.translation * PYTORCH3D_SIGNS, ends.shape)
        both = [to_homogeneous(torch.from_numpy(points.copy())).T for points in (starts, ends)]
        maps.append(torch.cat(both).reshape(8, CELLS, CELLS))
    return torch.stack(maps)


@pytest.mark.parametrize("center", ["mean", "intersection"])
@pytest.mark.parametrize("known", [True, False])
def test_cameras_of_colmap_are_recovered_exactly(tmp_path: Path, center: Any, known: bool) -> None:
    """A principal point far off the middle included, where the released split would turn cameras by degrees."""
    model = make_scene(tmp_path / "database.db", [900.0, 940.0, 400.0, 450.0])
    rotations, centers = (torch.from_numpy(part) for part in poses_of(model))
    sizes = torch.tensor([[1024.0, 768.0]]).repeat(len(centers), 1).double()
    focals, principals = (torch.tensor([part]).repeat(len(centers), 1).double() for part in ((900, 940), (400, 450)))
    true = CameraSet(rotations, centers, focals, principals, sizes).relative_to_first()
    found = recover_cameras(colmaps_maps(model), sizes, (focals, principals) if known else "all", center)
    torch.testing.assert_close(found.rotations, true.rotations, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.centers, true.centers, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.focals_px, true.focals_px, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.principals_px, true.principals_px, atol=1e-5, rtol=0)


def test_poses_solved_from_exact_matches_are_perfect(tmp_path: Path) -> None:
    truth = make_scene(tmp_path / "database.db", [1280.0, 1280.0, 512.0, 384.0])
    database = FeatureDatabase(tmp_path / "database.db", tmp_path, tmp_path / "none", 1000, 1000)
    (model,) = solve(database, tmp_path / "work", "incremental", lambda *_: None)
    found = compare_poses(poses_of(model), poses_of(truth))
    assert found.rra["5"] == found.rta["5"] == found.center_accuracy == 1.0 and found.auc_30 > 0.9999
    assert found.rotation_error_deg < 0.01 and found.center_error < 1e-4


def test_metrics_grow_with_the_noise_that_colmap_adds(tmp_path: Path) -> None:
    """Each camera is turned by an angle of deviation σ about a random axis, and its centre moved."""
    truth = make_scene(tmp_path / "database.db", [1280.0, 1280.0, 512.0, 384.0], num_frames=40)
    true, errors, centers = poses_of(truth), [], []
    for sigma in (0.5, 1.0, 2.0, 4.0):
        noisy = pycolmap.Reconstruction(truth)
        pycolmap.set_random_seed(1)
        pycolmap.synthesize_noise(
            pycolmap.SyntheticNoiseOptions(
                rig_from_world_rotation_stddev=sigma, rig_from_world_translation_stddev=0.02 * sigma
            ),
            noisy,
        )
        found = compare_poses(poses_of(noisy), true)
        errors.append(found.rotation_error_deg / sigma)
        centers.append(found.center_error)
    assert 0.8 < min(errors) <= max(errors) < 1.01 * min(errors) < 1.1
    assert np.diff(np.log2(centers)) == pytest.approx(np.ones(3), abs=0.05), centers
