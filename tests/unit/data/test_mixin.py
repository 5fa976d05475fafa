"""Features of whole images: how they are asked for, when they are prepared, and what evaluation gets of them."""

from pathlib import Path
from typing import Any

import pytest
import tyro

from f3rm_ext.data.image_datamanager import ImageDataManager, ImageDataManagerConfig
from f3rm_ext.errors import ConfigError


@pytest.fixture
def make(tiny_capture: Path, tmp_path: Path) -> Any:
    def build(test_mode: str = "val", extractors: tuple[str, ...] | None = None) -> ImageDataManager:
        config = ImageDataManagerConfig(data=tiny_capture)
        config.features.cache_dir = tmp_path
        config.features.extractors = (f"labels:data={tiny_capture}",) if extractors is None else extractors
        return config.setup(device="cpu", test_mode=test_mode)

    return build


@pytest.mark.parametrize("name", ["--pipeline.model.features", "--features.extractors"])
def test_two_names_of_one_option(name: str) -> None:
    config = tyro.cli(ImageDataManagerConfig, args=[name, "clip", "dinov2", "--features.codes", "64"])
    assert config.features.extractors == ("clip", "dinov2") and config.features.codes == 64
    assert tyro.cli(ImageDataManagerConfig, args=[]).features.extractors == ()
    with pytest.raises(ConfigError, match="PCA codes is 3"):
        tyro.cli(ImageDataManagerConfig, args=["--features.codes", "3"])


def test_training_prepares_them_before_the_first_step(make: Any, tmp_path: Path) -> None:
    manager = make()
    assert list(tmp_path.rglob("*.npy"))
    source = manager.train_feature_source()
    assert len(source) == 9 and source.specs[0].name == "labels"
    assert source.load(0)["labels"].values.shape[:2] == (48, 64)


def test_without_extractors_there_are_none(make: Any, tmp_path: Path) -> None:
    manager = make(extractors=())
    assert manager.train_feature_source() is None and manager.eval_feature_source() is None
    manager = make("test", extractors=())
    _, batch = manager.fixed_indices_eval_dataloader.get_camera(0)
    assert "feature_maps" not in batch and not list(tmp_path.rglob("*.npy"))


def test_evaluation_gets_maps(make: Any) -> None:
    manager = make("test")
    assert manager.train_feature_source() is None
    _, batch = manager.fixed_indices_eval_dataloader.get_camera(1)
    assert batch["feature_maps"]["labels"].values.shape[:2] == (48, 64)
    assert manager.eval_dataset.image_filenames[batch["image_idx"]].name == "frame_00007.png"


def test_the_viewer_needs_neither_extractor_nor_store(make: Any, tmp_path: Path) -> None:
    manager = make("inference", extractors=("nowhere",))
    assert manager.eval_feature_source() is None and manager.train_feature_source() is None
    assert not list(tmp_path.rglob("*"))


def test_evaluation_goes_on_where_features_cannot_be_had(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    manager = make("test", extractors=("nowhere",))
    for _ in range(2):
        assert manager.eval_feature_source() is None
    assert capsys.readouterr().out.count("Evaluating without 2D features") == 1
