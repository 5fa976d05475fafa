"""Lifting against the sum written out pixel by pixel, and what does not count."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.sampling import sample_map
from f3rm_ext.features.source import prepare_features
from f3rm_ext.splat import rendering as drawing
from f3rm_ext.splat.features import lifting
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions, smoothing_filter
from f3rm_ext.splat.rasterize import Backend, cpu
from f3rm_ext.splat.rendering import SplatScene

DIM = 7


@pytest.fixture
def views(ring_cameras: Callable[..., Any]) -> PinholeCameras:
    return PinholeCameras.of(ring_cameras(3))


@pytest.fixture
def scene(colorful: Callable[..., Gaussians], views: PinholeCameras) -> SplatScene:
    """Some Gaussians that overlap, and the last where no camera looks."""
    gaussians = colorful(30)
    gaussians.means[-1] = torch.tensor([0.0, 0.0, 50.0])
    mip = MipOptions()
    return SplatScene(gaussians, mip, smoothing_filter(gaussians.means, views, options=mip))


def maps(count: int = 3, dim: int = DIM, rows: int = 6, cols: int = 8) -> list[FeatureMap]:
    """Random features of 32 × 24 pixels."""
    generator = np.random.default_rng(0)
    grid = PatchGrid.covering(rows, cols, 24, 32)
    return [FeatureMap(generator.normal(size=(rows, cols, dim)).astype(np.float16), grid) for _ in range(count)]


def weights_of(scene: SplatScene, views: PinholeCameras, index: int) -> torch.Tensor:
    """wᵢ(p), (h, w, gaussians): each Gaussian in a channel of its own, by the reference rasteriser."""
    view = views.take(slice(index, index + 1))
    return drawing.composite(replace(scene, backend="torch"), view, torch.eye(len(scene.gaussians)))


def by_definition(
    scene: SplatScene, views: PinholeCameras, pictures: list[torch.Tensor], shares: list[torch.Tensor]
) -> torch.Tensor:
    """Σ w f / Σ w, pixel by pixel."""
    above, below = torch.zeros(len(scene.gaussians), pictures[0].shape[-1]), torch.zeros(len(scene.gaussians), 1)
    for index, (picture, share) in enumerate(zip(pictures, shares, strict=True)):
        weights = weights_of(scene, views, index)
        for row in range(weights.shape[0]):
            for col in range(weights.shape[1]):
                weight = weights[row, col, :, None] * share[row, col]
                above += weight * picture[row, col]
                below += weight
    return torch.where(below > 0, above / below, 0.0)


def upsample_by_points(feature_map: FeatureMap) -> torch.Tensor:
    rows, cols = np.meshgrid(np.arange(24) + 0.5, np.arange(32) + 0.5, indexing="ij")
    sampled = sample_map(feature_map, np.stack([rows.ravel(), cols.ravel()], axis=1))
    return torch.from_numpy(sampled).view(24, 32, -1)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_codes_are_the_weighted_means_of_what_pixels_have(
    scene: SplatScene, views: PinholeCameras, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifting, "channels_at_once", lambda scene: 3)  # slices of 3, 3 and 1 channels
    found, looked = maps(), []
    scene = replace(scene, backend=backend)
    codes = lifting.lift_maps(scene, views, DIM, found.__getitem__, on_view=lambda: looked.append(1))
    pictures = [upsample_by_points(feature_map) for feature_map in found]
    wanted = by_definition(scene, views, pictures, [torch.ones(24, 32)] * 3)
    assert codes.dtype == torch.float16 and len(looked) == 9
    torch.testing.assert_close(codes.float(), wanted, atol=2e-3, rtol=2e-3)
    assert wanted.std() > 0.1 and (codes[-1] == 0).all() and (codes[:-1] != 0).any(dim=1).sum() > 20


def test_pixels_count_by_their_share(scene: SplatScene, views: PinholeCameras) -> None:
    found = maps()
    shares = [torch.rand(24, 32, generator=torch.Generator().manual_seed(i)).round() for i in range(3)]
    codes = lifting.lift_maps(scene, views, DIM, found.__getitem__, shares.__getitem__)
    wanted = by_definition(scene, views, [upsample_by_points(feature_map) for feature_map in found], shares)
    torch.testing.assert_close(codes.float(), wanted, atol=2e-3, rtol=2e-3)
    plain = lifting.lift_maps(scene, views, DIM, found.__getitem__)
    assert (plain - codes).abs().max() > 0.05


@pytest.mark.parametrize(
    "grid",
    [
        PatchGrid.covering(1, 1, 24, 32),
        PatchGrid.covering(24, 32, 24, 32),  # a patch for each pixel
        PatchGrid.covering(2, 50, 24, 32),
        PatchGrid(rows=3, cols=4, origin_px=(7.3, 5.1), stride_px=(2.2, 3.9)),  # in the middle of the image
    ],
)
@pytest.mark.parametrize("runs", [1, 3])
def test_patches_add_up_to_what_pixels_do(
    scene: SplatScene, views: PinholeCameras, grid: PatchGrid, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs > 1:
        monkeypatch.setattr(cpu, "BUFFER", 1)  # a tile at a time
    dice = np.random.default_rng(0)
    feature_map = FeatureMap(dice.normal(size=(grid.rows, grid.cols, DIM)).astype(np.float16), grid)
    share = torch.from_numpy(dice.uniform(size=(24, 32)).astype(np.float32)).round(decimals=1)
    found = []
    for backend in ("numba", "torch"):
        sums = torch.ones(len(scene.gaussians), DIM)
        one = replace(scene, backend=backend)
        added = lifting.add_view(one, views.take(slice(0, 1)), feature_map, slice(None), share, sums)
        found.append((added, sums))
    for actual, wanted in zip(*found, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert found[0][0].max() > 1 and (found[0][1] != 1).any()


def test_gaussians_are_grouped_by_what_views_see_of_them(scene: SplatScene, views: PinholeCameras) -> None:
    seen = lifting.Seen(len(scene.gaussians), 3)
    codes = lifting.lift_maps(scene, views, DIM, maps().__getitem__, on_weights=seen.add)
    for index in range(3):
        sums = weights_of(scene, views, index).sum(dim=(0, 1))
        found = torch.from_numpy(seen._roots[:, index]).float().square()
        torch.testing.assert_close(found, sums, atol=1e-2, rtol=1e-2)
    groups = lifting.group_gaussians(scene, codes, seen)
    assert groups.dtype == torch.int32 and groups[-1] == -1 and set(groups[:-1].tolist()) >= {0}


def test_masks_and_alpha_make_shares_and_plain_images_are_read_once() -> None:
    asked: list[int] = []
    rgba = torch.zeros(4, 5, 4, dtype=torch.uint8)
    rgba[..., 3] = 51
    valid = torch.zeros(4, 5, dtype=torch.bool)
    valid[1] = True
    pictures = [
        SimpleNamespace(pixels=rgba[..., :3], valid=None),
        SimpleNamespace(pixels=rgba, valid=None),
        SimpleNamespace(pixels=rgba[..., :3], valid=valid),
        SimpleNamespace(pixels=rgba, valid=valid),
    ]

    class Dataset(lifting.PinholeDataset):
        def __init__(self) -> None: ...

        def picture(self, image_idx: int) -> Any:
            asked.append(image_idx)
            return pictures[image_idx]

    shares = lifting.Shares(Dataset())
    assert shares(0) is None and shares(0) is None and asked == [0]
    alpha, masked, both = shares(1), shares(2), shares(3)
    assert alpha is not None and masked is not None and both is not None
    torch.testing.assert_close(alpha, torch.full((4, 5), 0.2))
    torch.testing.assert_close(masked, valid.float())
    torch.testing.assert_close(both, 0.2 * valid)


@pytest.mark.parametrize("codes", [0, 8])
def test_labels_lifted_and_drawn_again_are_the_labels(tiny_capture: Path, tmp_path: Path, codes: int) -> None:
    """Gaussians on the true surfaces, as small as pixels: what they carry looks like what was lifted."""
    manager = ImageDataManagerConfig(data=tiny_capture).setup(device="cpu", test_mode="test")
    dataset, outputs = manager.train_dataset, manager.train_dataparser_outputs
    options = FeatureOptions((f"labels:data={tiny_capture}",), tmp_path, codes)
    (source,) = prepare_features([dataset], options, device="cpu")
    cameras, points, sizes = dataset.cameras, [], []
    for index, file in enumerate(dataset.image_filenames):
        rays = cameras.generate_rays(camera_indices=index, keep_shape=True)
        # Files say millimetres along the axis.
        depth_mm = torch.from_numpy(np.asarray(Image.open(tiny_capture / "depth" / file.name), dtype=np.float32))
        depth = depth_mm / 1000.0 * outputs.dataparser_scale
        axis = -cameras.camera_to_worlds[index, :3, 2]
        along = depth[..., None] / (rays.directions @ axis)[..., None]
        points.append((rays.origins + rays.directions * along)[depth > 0])
        sizes.append(0.4 * depth[depth > 0] / cameras.fx[index])
    means = torch.cat(points)
    count = len(means)
    gaussians = Gaussians(
        means=means,
        scales=torch.cat(sizes)[:, None].repeat(1, 3).log(),
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(count, 1),
        opacities=torch.full((count, 1), 3.0),
        features_dc=torch.zeros(count, 3),
        features_rest=torch.zeros(count, 0, 3),
    )
    scene = SplatScene(gaussians, MipOptions())
    (head,) = lifting.lift(scene, dataset, source)
    assert head.codes.shape == (count, codes or source.specs[0].dim)
    assert lifting.count_lifting_steps(scene, dataset, source) == 9
    right, cosines = [], []
    for index in range(len(cameras)):
        view = PinholeCameras.of(cameras[index : index + 1])
        rendered = head.space().features(drawing.composite(scene, view, head.codes.float()))
        wanted = torch.from_numpy(source.load(index)[head.name].values.astype(np.float32))
        cosines.append(torch.nn.functional.cosine_similarity(rendered, wanted, dim=-1).mean())
        right.append((rendered.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean())
    least = 0.8 if codes else 0.9  # 8 codes tell few of the 29 classes apart
    assert torch.stack(cosines).mean() > least, cosines
    assert codes or torch.stack(right).mean() > 0.92, right
