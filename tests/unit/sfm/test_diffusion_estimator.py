"""DiffusionSfM as a front end: photos and a checkpoint in, world-to-camera matrices and focal lengths out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext import compat
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.estimators import build_estimator, predict_poses

pytest.importorskip("diffusers")

from f3rm_ext.sfm.diffusion import estimator
from f3rm_ext.sfm.diffusion.model import ModelSize, RayDiffuser
from f3rm_ext.sfm.diffusion.prediction import predict_photos


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{name}.jpg" for name in "abc"]
    for path in paths:
        image = Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
        exif = image.getexif()
        if path.stem == "c":
            exif.get_ifd(0x8769)[37386] = 4.2
        image.save(path, exif=exif)
    return paths


def save_weights(path: Path, vit: VisionTransformer) -> RayDiffuser:
    torch.manual_seed(0)
    model = RayDiffuser(vit, ModelSize(width=64, depth=4, heads=1, head_width=16), "sparse")
    torch.save({"state_dict": model.state_dict(), "settings": {"dataset.image_size": 42}}, path)
    return model


def test_poses_are_those_of_the_model(
    photos: list[Path], small_vit: VisionTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights, so what is tested is the way from photos to matrices."""
    model = save_weights(tmp_path / "weights.pth", small_vit).to(compat.default_device_type())
    monkeypatch.setenv(estimator.WEIGHTS, str(tmp_path / "weights.pth"))
    registered = build_estimator("diffusionsfm")
    assert registered is estimator.predict
    found = predict_poses("diffusionsfm", estimator.predict, photos)
    wanted = predict_photos(model, [np.asarray(Image.open(path).convert("RGB")) for path in photos], side_px=42)
    for path, rotation, center, focal in zip(photos, wanted.rotations, wanted.centers, wanted.focals_px, strict=True):
        viewmat = np.linalg.inv(found.viewmats[path.name])
        np.testing.assert_allclose(viewmat[:3, :3], rotation, atol=1e-6)
        np.testing.assert_allclose(viewmat[:3, 3], center, atol=1e-6)
        assert found.focal_px[path.name] == pytest.approx(float(focal.mean())), "in mm alone EXIF does not tell it"


def test_missing_weights_are_one_sentence(photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(estimator.WEIGHTS, raising=False)
    with pytest.raises(ConfigError, match="F3RM_EXT_DIFFUSIONSFM"):
        estimator.predict(photos)
    monkeypatch.setenv(estimator.WEIGHTS, str(tmp_path / "none.pth"))
    with pytest.raises(CheckpointError, match=r"none\.pth"):
        estimator.predict(photos)
