"""From data sets to features: keys that follow pixels, head names, codes of evaluation images, one clear error."""

import dataclasses
import gc
import json
import pickle
import shutil
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features import stored_head
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.pca_codes import project_query
from f3rm_ext.features.source import FeatureSource, head_names, open_features, prepare_features
from f3rm_ext.features.store.feature_store import cache_root
from f3rm_ext.features.store.images import on_white
from f3rm_ext.utils.atomic_files import FolderLock

pytestmark = pytest.mark.usefixtures("no_fsync", "quick_collection")


@pytest.fixture
def train(toy: ModuleType, tmp_path: Path) -> list[Path]:
    return toy.write_images(tmp_path / "train", 5)


@pytest.fixture
def evaluation(toy: ModuleType, tmp_path: Path) -> list[Path]:
    return toy.write_images(tmp_path / "eval", 2, seed=9)


def prepare(
    toy: ModuleType,
    tmp_path: Path,
    *sets: list[Path],
    extractors: tuple[str, ...] = ("toy",),
    codes: int = 0,
    **more: Any,
) -> list[FeatureSource]:
    log = tmp_path / "log.txt"
    build = more.pop("build", lambda text, *, device: toy.ToyExtractor(log, model=text))
    options = FeatureOptions(extractors=extractors, cache_dir=tmp_path / "cache", codes=codes)
    return prepare_features([toy.ToyDataset(paths) for paths in sets], options, device="cpu", build=build, **more)


def extracted(tmp_path: Path) -> int:
    log = tmp_path / "log.txt"
    return len(log.read_text().split()) if log.exists() else 0


def shards(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("features/*/shards/*.npy"))


def test_sources_follow_the_data_sets(
    toy: ModuleType, tmp_path: Path, train: list[Path], evaluation: list[Path]
) -> None:
    sources = prepare(toy, tmp_path, train, evaluation)
    assert [len(source) for source in sources] == [5, 2]
    extractor = toy.ToyExtractor()
    for source, paths in zip(sources, (train, evaluation), strict=True):
        dataset = toy.ToyDataset(paths)
        for i in range(len(paths)):
            image = dataset.get_numpy_image(i)
            loaded = source.load(i)["toy"]
            np.testing.assert_array_equal(loaded.values, extractor.extract([image])[0].numpy().astype(np.float16))
            assert loaded.grid == extractor.patch_grid(*image.shape[:2])


def test_spec_says_what_is_distilled(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    (spec,) = prepare(toy, tmp_path, train)[0].specs
    assert (spec.name, spec.dim, spec.extractor, spec.code_basis) == ("toy", 12, "toy", None)
    assert spec.identity["extractor"] == "toy" and spec.identity["resolution"] == "as it is"
    assert spec.display.components.shape == (3, 12) and (spec.display.high > spec.display.low).all()


def test_second_start_neither_decodes_nor_extracts_nor_writes(
    toy: ModuleType, tmp_path: Path, train: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(toy, tmp_path, train, codes=8)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}

    def refuse(*_: object) -> None:
        pytest.fail("an image was decoded")

    monkeypatch.setattr(toy.ToyDataset, "get_numpy_image", refuse)
    second = prepare(toy, tmp_path, train, codes=8)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before
    assert second[0].keys == first[0].keys
    one, two = first[0].specs[0], second[0].specs[0]
    assert torch.equal(one.display.components, two.display.components)


def test_moved_renamed_and_resplit_images_are_not_extracted_again(
    toy: ModuleType, tmp_path: Path, train: list[Path], evaluation: list[Path]
) -> None:
    prepare(toy, tmp_path, train, evaluation)
    assert extracted(tmp_path) == 7
    moved = []
    for number, path in enumerate([*train, *evaluation]):
        moved.append(tmp_path / "moved" / f"other-{number}.png")
        moved[-1].parent.mkdir(exist_ok=True)
        path.rename(moved[-1])
    sources = prepare(toy, tmp_path, moved[2:], moved[:2])
    assert extracted(tmp_path) == 7 and [len(source) for source in sources] == [5, 2]


def test_changed_pixels_are_extracted_again(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    before = prepare(toy, tmp_path, train)[0].keys
    pixels = np.array(Image.open(train[1]))
    pixels[0, 0, 0] ^= 1
    Image.fromarray(pixels).save(train[1])
    after = prepare(toy, tmp_path, train)[0].keys
    assert extracted(tmp_path) == 6
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True, True]


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"entries": {"x": 3}}', pickle.dumps({"entries": {}})])
def test_lost_or_damaged_index_costs_time_only(
    toy: ModuleType, tmp_path: Path, train: list[Path], content: bytes | None
) -> None:
    keys = prepare(toy, tmp_path, train)[0].keys
    index = tmp_path / "cache" / "features" / "images.json"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    assert prepare(toy, tmp_path, train)[0].keys == keys
    assert extracted(tmp_path) == 5
    assert len(json.loads(index.read_text())["entries"]) == 5


def test_transparent_images_are_laid_on_white(toy: ModuleType, tmp_path: Path) -> None:
    paths = toy.write_images(tmp_path / "rgba", 1, channels=4)
    loaded = prepare(toy, tmp_path, paths)[0].load(0)["toy"].values
    raw = toy.ToyDataset(paths).get_numpy_image(0)
    np.testing.assert_array_equal(loaded, toy.ToyExtractor().extract([on_white(raw)])[0].numpy().astype(np.float16))


def test_head_names_are_unique() -> None:
    texts = ("clip", "dinov2:weights=/a/b.pth", "clip:model=RN50", "clip_2", "clip", "my.own:x=1")
    assert head_names(texts) == ["clip", "dinov2", "clip_2", "clip_2_2", "clip_3", "my_own"]


def test_several_extractors_side_by_side(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    (source,) = prepare(toy, tmp_path, train, extractors=("toy:a=1", "toy:a=2"))
    assert [spec.name for spec in source.specs] == ["toy", "toy_2"]
    assert set(source.load(0)) == {"toy", "toy_2"}
    assert len({path.parent for path in shards(tmp_path)}) == 2


def test_no_extractor_means_no_features(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    (source,) = prepare(toy, tmp_path, train, extractors=())
    assert source.specs == () and source.load(3) == {} and len(source) == 5


def test_codes_of_evaluation_images_use_the_training_basis(
    toy: ModuleType, tmp_path: Path, train: list[Path], evaluation: list[Path]
) -> None:
    full = prepare(toy, tmp_path, train, evaluation)
    coded = prepare(toy, tmp_path, train, evaluation, codes=8)
    alone = prepare(toy, tmp_path, train, codes=8)
    assert extracted(tmp_path) == 7, "codes come from the stored features"
    spec = coded[1].specs[0]
    assert spec.dim == 8 and spec.code_basis is not None and spec.display.components.shape == (3, 8)
    assert alone[0].specs[0].code_basis is not None
    assert torch.equal(spec.code_basis, alone[0].specs[0].code_basis)
    f = torch.from_numpy(np.array(full[1].load(0)["toy"].values)).float()
    c = coded[1].load(0)["toy"]
    assert np.abs(c.values - project_query(spec.code_basis, f).numpy()).max() < 2e-3
    assert c.residual_norm is not None and c.residual_norm.shape == c.values.shape[:2]
    assert len(shards(tmp_path)) == 7, "the full features are kept"


def test_more_codes_than_dimensions_is_an_error(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"12 PCA codes.*12 dimensions of toy"):
        prepare(toy, tmp_path, train, codes=12)
    assert extracted(tmp_path) == 0


def test_no_images_is_an_error(toy: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="training images"):
        prepare(toy, tmp_path, [])


def test_extractors_are_released(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    built: list[weakref.ref] = []

    def build(text: str, *, device: torch.device) -> Any:
        assert not any(reference() for reference in built), "two extractors at once"
        extractor = toy.ToyExtractor(model=text)
        built.append(weakref.ref(extractor))
        return extractor

    sources = prepare(toy, tmp_path, train, extractors=("a", "b"), build=build)
    gc.collect()
    assert len(built) == 2 and [reference() for reference in built] == [None, None]
    assert set(sources[0].load(0)) == {"a", "b"}


def test_another_model_does_not_reuse_features(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    prepare(toy, tmp_path, train)
    prepare(toy, tmp_path, train, extractors=("toy:model=two",))
    assert extracted(tmp_path) == 10


def test_folder_of_another_model_is_refused(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    """As when a folder was renamed by hand."""
    prepare(toy, tmp_path, train, extractors=("one",))
    prepare(toy, tmp_path, train[:1], extractors=("two",))
    one, two = sorted((tmp_path / "cache" / "features").glob("toy-*"), key=lambda p: len(list(p.rglob("*.npy"))))
    (one / "manifest.json").write_bytes((two / "manifest.json").read_bytes())
    with pytest.raises(FeatureStoreError, match="another model"):
        prepare(toy, tmp_path, train, extractors=("two",))


def test_truncated_shard_is_an_error_that_names_it_and_repair_mends_it(
    toy: ModuleType, tmp_path: Path, train: list[Path]
) -> None:
    prepare(toy, tmp_path, train)
    path = shards(tmp_path)[2]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FeatureStoreError, match=f"{path.name}.*features extract"):
        prepare(toy, tmp_path, train)
    prepare(toy, tmp_path, train, repair=True)
    assert extracted(tmp_path) == 6
    prepare(toy, tmp_path, train)


def test_shard_of_other_images_is_found_when_it_is_loaded(toy: ModuleType, tmp_path: Path) -> None:
    paths = toy.write_images(tmp_path / "train", 1)
    other = tmp_path / "train" / "other.png"
    Image.fromarray(255 - np.array(Image.open(paths[0]))).save(other)  # same size, other pixels
    prepare(toy, tmp_path, [*paths, other])
    one, two = shards(tmp_path)
    two.write_bytes(one.read_bytes())
    (source,) = prepare(toy, tmp_path, [*paths, other])
    with pytest.raises(FeatureStoreError, match=f"{two.name}.*another image"):
        for i in range(2):
            source.load(i)


def test_deleted_shard_and_display_are_made_again(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    expected = prepare(toy, tmp_path, train)[0].specs[0].display
    shards(tmp_path)[0].unlink()
    for path in (tmp_path / "cache").rglob("display/*.json"):
        path.write_text("{}")
    again = prepare(toy, tmp_path, train)[0].specs[0].display
    assert extracted(tmp_path) == 6
    assert torch.equal(again.components, expected.components) and torch.equal(again.low, expected.low)


def test_deleted_codes_folder_is_made_again(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    prepare(toy, tmp_path, train, codes=8)
    for path in (tmp_path / "cache").glob("features/*/codes/*/basis.npy"):
        path.unlink()
    assert prepare(toy, tmp_path, train, codes=8)[0].load(0)["toy"].values.shape[2] == 8
    assert extracted(tmp_path) == 5


def test_complete_read_only_cache_is_enough(
    toy: ModuleType, tmp_path: Path, train: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(toy, tmp_path, train, codes=8)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("write_atomic", "sync_folder"):
        monkeypatch.setattr(f"f3rm_ext.utils.atomic_files.{name}", refuse)
    monkeypatch.setattr("f3rm_ext.utils.atomic_files.FolderLock.hold", refuse)
    assert prepare(toy, tmp_path, train, codes=8)[0].load(0)["toy"].values.shape[2] == 8
    with pytest.raises(FeatureStoreError, match="cannot be written"):
        prepare(toy, tmp_path, train, extractors=("other",))


def test_loads_from_many_threads(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    (source,) = prepare(toy, tmp_path, train)
    expected = [float(np.asarray(source.load(i)["toy"].values, np.float32).sum()) for i in range(5)]
    (source,) = prepare(toy, tmp_path, train)
    together, wrong = threading.Barrier(6), []

    def work() -> None:
        together.wait()
        for i in (0, 3, 1, 4, 2):
            if float(np.asarray(source.load(i)["toy"].values, np.float32).sum()) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_cache_folder_comes_from_option_environment_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("F3RM_EXT_CACHE", str(tmp_path / "env"))
    assert cache_root(tmp_path / "given") == tmp_path / "given" / "features"
    assert cache_root(None) == tmp_path / "env" / "features"
    monkeypatch.delenv("F3RM_EXT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "f3rm_ext" / "features"


# --- opening what a checkpoint describes -----------------------------------------------------------------------------


def reopened(toy: ModuleType, tmp_path: Path, specs: Any, *sets: list[Path]) -> list[FeatureSource] | None:
    """As a fresh process would."""
    return open_features([toy.ToyDataset(paths) for paths in sets], specs, tmp_path / "cache")


@pytest.mark.parametrize("codes", [0, 8])
def test_features_are_opened_without_an_extractor(
    toy: ModuleType,
    tmp_path: Path,
    train: list[Path],
    evaluation: list[Path],
    codes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = prepare(toy, tmp_path, train, evaluation, codes=codes)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("an extractor is built")

    monkeypatch.setattr("f3rm_ext.features.source.build_extractor", forbidden)
    opened = reopened(toy, tmp_path, made[0].specs, train, evaluation)
    assert opened is not None and [source.keys for source in opened] == [source.keys for source in made]
    (spec,), (before,) = opened[0].specs, made[0].specs
    assert (spec.name, spec.dim, spec.extractor, spec.identity) == ("toy", codes or 12, "toy", before.identity)
    assert (spec.code_basis is None) == (codes == 0)
    for source, original in zip(opened, made, strict=True):
        for i in range(len(source)):
            found, expected = source.load(i)["toy"], original.load(i)["toy"]
            np.testing.assert_array_equal(found.values, expected.values)
            assert found.grid == expected.grid and (found.residual_norm is None) == (codes == 0)


def test_several_features_are_opened_in_their_order(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    specs = prepare(toy, tmp_path, train, extractors=("toy", "other"))[0].specs
    opened = reopened(toy, tmp_path, specs[::-1], train)
    assert opened is not None and [spec.name for spec in opened[0].specs] == ["other", "toy"]
    assert set(opened[0].load(0)) == {"toy", "other"}


@pytest.mark.parametrize("missing", ["shard", "store", "photo", "basis", "display", "other weights"])
def test_nothing_is_opened_where_something_is_missing(
    toy: ModuleType, tmp_path: Path, train: list[Path], evaluation: list[Path], missing: str
) -> None:
    specs = prepare(toy, tmp_path, train, codes=8)[0].specs
    sets, cache = [train], tmp_path / "cache" / "features"
    if missing == "shard":
        next(cache.glob("*/codes/*/shards/*.npy")).unlink()
    elif missing == "store":
        shutil.rmtree(cache)
    elif missing == "photo":
        sets = [train, evaluation]
    elif missing == "basis":
        next(cache.glob("*/codes/*/spectrum.json")).unlink()
    elif missing == "display":
        next(cache.glob("*/codes/*/display/*.json")).unlink()
    else:
        specs = [dataclasses.replace(specs[0], identity={**specs[0].identity, "weights": "new"})]
    assert reopened(toy, tmp_path, specs, *sets) is None


def test_damaged_features_are_not_opened(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    specs = prepare(toy, tmp_path, train)[0].specs
    shard = shards(tmp_path)[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(FeatureStoreError, match=shard.name):
        reopened(toy, tmp_path, specs, train)


def test_the_first_process_waits_while_any_other_is_at_work(
    toy: ModuleType, tmp_path: Path, train: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three processes, one is killed after 100 seconds of work and another never begins."""
    now, at_work = [0.0], ExitStack()

    def sleep(_: float) -> None:
        now[0] += 1
        if now[0] == 1:
            (lock,) = tmp_path.glob("cache/features/*/lock")
            at_work.enter_context(FolderLock(lock.parent / "parts" / "1" / "lock").hold())
        if now[0] == 100:
            at_work.close()

    monkeypatch.setattr(stored_head, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    prepare(toy, tmp_path, train, local_rank=0, world_size=3, local_size=3)
    assert 100 + stored_head._LATE_S <= now[0] < 105 + stored_head._LATE_S and extracted(tmp_path) == 5
