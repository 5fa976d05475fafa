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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError, FeatureStoreError, UserError
from f3rm_ext.features import source as source_module
from f3rm_ext.features import stored_head
from f3rm_ext.features.pca_codes import project_query
from f3rm_ext.features.source import head_names
from f3rm_ext.features.store.feature_store import cache_root
from f3rm_ext.features.store.images import blend_background
from f3rm_ext.utils.atomic_files import FolderLock

pytestmark = pytest.mark.usefixtures("no_fsync", "quick_collection")


def test_sources_follow_the_data_sets(lab):
    sources = lab.prepare(lab.train, lab.evaluation)
    assert [len(source) for source in sources] == [5, 2]
    extractor = lab.toy.ToyExtractor()
    for source, paths in zip(sources, (lab.train, lab.evaluation), strict=True):
        dataset = lab.toy.ToyDataset(paths)
        for i in range(len(paths)):
            image = dataset.get_numpy_image(i)
            loaded = source.load(i)["toy"]
            np.testing.assert_array_equal(loaded.values, extractor.extract([image])[0].numpy().astype(np.float16))
            assert loaded.grid == extractor.patch_grid(*image.shape[:2])


def test_spec_says_what_is_distilled(lab):
    (spec,) = lab.prepare(lab.train)[0].specs
    assert (spec.name, spec.dim, spec.extractor, spec.code_basis) == ("toy", 12, "toy", None)
    assert spec.identity["extractor"] == "toy" and spec.identity["resolution"] == "as it is"
    assert spec.display.components.shape == (3, 12) and (spec.display.high > spec.display.low).all()


def test_second_start_neither_decodes_nor_extracts_nor_writes(lab, watch_calls):
    first = lab.prepare(lab.train, codes=8)
    before = {path: path.stat().st_mtime_ns for path in lab.cache.rglob("*")}
    decoded = watch_calls(lab.toy.ToyDataset, "get_numpy_image")
    second = lab.prepare(lab.train, codes=8)
    assert not decoded
    assert {path: path.stat().st_mtime_ns for path in lab.cache.rglob("*")} == before
    assert second[0].keys == first[0].keys
    one, two = first[0].specs[0], second[0].specs[0]
    assert torch.equal(one.display.components, two.display.components)


def test_moved_renamed_and_resplit_images_are_not_extracted_again(lab):
    lab.prepare(lab.train, lab.evaluation)
    assert len(lab.logged()) == 7
    moved = []
    for number, path in enumerate([*lab.train, *lab.evaluation]):
        moved.append(lab.folder / "moved" / f"other-{number}.png")
        moved[-1].parent.mkdir(exist_ok=True)
        path.rename(moved[-1])
    sources = lab.prepare(moved[2:], moved[:2])
    assert len(lab.logged()) == 7 and [len(source) for source in sources] == [5, 2]


def test_changed_pixels_are_extracted_again(lab):
    before = lab.prepare(lab.train)[0].keys
    pixels = np.array(Image.open(lab.train[1]))
    pixels[0, 0, 0] ^= 1
    Image.fromarray(pixels).save(lab.train[1])
    after = lab.prepare(lab.train)[0].keys
    assert len(lab.logged()) == 6
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True, True]


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"entries": {"x": 3}}', pickle.dumps({"entries": {}})])
def test_lost_or_damaged_index_costs_time_only(lab, content):
    keys = lab.prepare(lab.train)[0].keys
    index = lab.cache / "features" / "images.json"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    assert lab.prepare(lab.train)[0].keys == keys
    assert len(lab.logged()) == 5
    assert len(json.loads(index.read_text())["entries"]) == 5


def test_transparent_images_are_laid_on_white(lab):
    paths = lab.toy.write_images(lab.folder / "rgba", 1, channels=4)
    loaded = lab.prepare(paths)[0].load(0)["toy"].values
    raw = lab.toy.ToyDataset(paths).get_numpy_image(0)
    white = blend_background(raw)
    np.testing.assert_array_equal(loaded, lab.toy.ToyExtractor().extract([white])[0].numpy().astype(np.float16))


def test_head_names_are_unique() -> None:
    texts = ("clip", "dinov2:weights=/a/b.pth", "clip:model=RN50", "clip_2", "clip", "my.own:x=1")
    assert head_names(texts) == ["clip", "dinov2", "clip_2", "clip_2_2", "clip_3", "my_own"]


def test_several_extractors_side_by_side(lab):
    (source,) = lab.prepare(lab.train, extractors=("toy:a=1", "toy:a=2"))
    assert [spec.name for spec in source.specs] == ["toy", "toy_2"]
    assert set(source.load(0)) == {"toy", "toy_2"}
    assert len({path.parent for path in lab.shards()}) == 2


def test_no_extractor_means_no_features(lab):
    (source,) = lab.prepare(lab.train, extractors=())
    assert source.specs == () and source.load(3) == {} and len(source) == 5


def test_codes_of_evaluation_images_use_the_training_basis(lab):
    full = lab.prepare(lab.train, lab.evaluation)
    coded = lab.prepare(lab.train, lab.evaluation, codes=8)
    alone = lab.prepare(lab.train, codes=8)
    assert len(lab.logged()) == 7, "codes come from the stored features"
    spec = coded[1].specs[0]
    assert spec.dim == 8 and spec.code_basis is not None and spec.display.components.shape == (3, 8)
    assert alone[0].specs[0].code_basis is not None
    assert torch.equal(spec.code_basis, alone[0].specs[0].code_basis)
    f = torch.from_numpy(np.array(full[1].load(0)["toy"].values)).float()
    c = coded[1].load(0)["toy"]
    assert np.abs(c.values - project_query(spec.code_basis, f).numpy()).max() < 2e-3
    assert c.residual_norm is not None and c.residual_norm.shape == c.values.shape[:2]
    assert len(lab.shards()) == 7, "the full features are kept"


def test_more_codes_than_dimensions_is_an_error(lab):
    with pytest.raises(ConfigError, match=r"12.*12.*toy"):
        lab.prepare(lab.train, codes=12)
    assert len(lab.logged()) == 0


@pytest.mark.parametrize(
    ("later", "codes", "why"),
    [("labels", 0, "data=CAPTURE"), ("unknown", 0, "no extractor"), ("labels:data={}", 64, "64 PCA codes")],
)
def test_mistakes_in_later_extractors_appear_before_the_first_works(lab, tiny_capture, later, codes, why):
    Image.new("RGB", (40, 40)).save(lab.folder / "large.png")
    extractors = ("dense-daisy", later.format(tiny_capture))
    with pytest.raises(UserError, match=why):
        lab.prepare([lab.folder / "large.png"], extractors=extractors, codes=codes, build=None)
    assert not lab.shards()


def test_no_images_is_an_error(lab):
    with pytest.raises(ConfigError, match="training images"):
        lab.prepare([])


def test_extractors_are_released(lab):
    built: list[weakref.ref] = []

    def build(text: str, *, device: torch.device) -> Any:
        assert not any(reference() for reference in built), "two extractors at once"
        extractor = lab.toy.ToyExtractor(model=text)
        built.append(weakref.ref(extractor))
        return extractor

    sources = lab.prepare(lab.train, extractors=("a", "b"), build=build)
    gc.collect()
    assert len(built) == 2 and [reference() for reference in built] == [None, None]
    assert set(sources[0].load(0)) == {"a", "b"}


def test_truncated_shard_is_an_error_that_names_it_and_repair_mends_it(lab):
    lab.prepare(lab.train)
    path = lab.shards()[2]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FeatureStoreError, match=f"{path.name}.*features extract"):
        lab.prepare(lab.train)
    lab.prepare(lab.train, repair=True)
    assert len(lab.logged()) == 6
    lab.prepare(lab.train)


def test_deleted_shard_and_display_are_made_again(lab):
    expected = lab.prepare(lab.train)[0].specs[0].display
    lab.shards()[0].unlink()
    for path in lab.cache.rglob("display/*.json"):
        path.write_text("{}")
    again = lab.prepare(lab.train)[0].specs[0].display
    assert len(lab.logged()) == 6
    assert torch.equal(again.components, expected.components) and torch.equal(again.low, expected.low)


def test_complete_read_only_cache_is_enough(lab, monkeypatch):
    lab.prepare(lab.train, codes=8)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("write_atomic", "sync_folder"):
        monkeypatch.setattr(f"f3rm_ext.utils.atomic_files.{name}", refuse)
    monkeypatch.setattr("f3rm_ext.utils.atomic_files.FolderLock.hold", refuse)
    assert lab.prepare(lab.train, codes=8)[0].load(0)["toy"].values.shape[2] == 8
    with pytest.raises(FeatureStoreError, match="cannot be written"):
        lab.prepare(lab.train, extractors=("other",))


def test_loads_from_many_threads(lab):
    (source,) = lab.prepare(lab.train)
    expected = [float(np.asarray(source.load(i)["toy"].values, np.float32).sum()) for i in range(5)]
    (source,) = lab.prepare(lab.train)
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


@pytest.mark.parametrize("codes", [0, 8])
def test_features_are_opened_without_an_extractor(lab, codes, watch_calls):
    made = lab.prepare(lab.train, lab.evaluation, codes=codes)
    built = watch_calls(source_module, "build_extractor")
    opened = lab.reopen(made[0].specs, lab.train, lab.evaluation)
    assert not built
    assert opened is not None and [source.keys for source in opened] == [source.keys for source in made]
    (spec,), (before,) = opened[0].specs, made[0].specs
    assert (spec.name, spec.dim, spec.extractor, spec.identity) == ("toy", codes or 12, "toy", before.identity)
    assert (spec.code_basis is None) == (codes == 0)
    for source, original in zip(opened, made, strict=True):
        for i in range(len(source)):
            found, expected = source.load(i)["toy"], original.load(i)["toy"]
            np.testing.assert_array_equal(found.values, expected.values)
            assert found.grid == expected.grid and (found.residual_norm is None) == (codes == 0)


def test_several_features_are_opened_in_their_order(lab):
    specs = lab.prepare(lab.train, extractors=("toy", "other"))[0].specs
    opened = lab.reopen(specs[::-1], lab.train)
    assert opened is not None and [spec.name for spec in opened[0].specs] == ["other", "toy"]
    assert set(opened[0].load(0)) == {"toy", "other"}


@pytest.mark.parametrize("missing", ["shard", "store", "photo", "basis", "display", "other weights"])
def test_nothing_is_opened_where_something_is_missing(lab, missing):
    specs = lab.prepare(lab.train, codes=8)[0].specs
    sets, cache = [lab.train], lab.cache / "features"
    if missing == "shard":
        next(cache.glob("*/codes/*/shards/*.npy")).unlink()
    elif missing == "store":
        shutil.rmtree(cache)
    elif missing == "photo":
        sets = [lab.train, lab.evaluation]
    elif missing == "basis":
        next(cache.glob("*/codes/*/spectrum.json")).unlink()
    elif missing == "display":
        next(cache.glob("*/codes/*/display/*.json")).unlink()
    else:
        specs = [dataclasses.replace(specs[0], identity={**specs[0].identity, "weights": "new"})]
    assert lab.reopen(specs, *sets) is None


def test_damaged_features_are_not_opened(lab):
    specs = lab.prepare(lab.train)[0].specs
    shard = lab.shards()[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(FeatureStoreError, match=shard.name):
        lab.reopen(specs, lab.train)


def test_the_first_process_waits_while_any_other_is_at_work(lab, monkeypatch):
    """Of three processes, one is killed after 100 seconds of work and another never begins."""
    now, at_work = [0.0], ExitStack()

    def sleep(_: float) -> None:
        now[0] += 1
        if now[0] == 1:
            (lock,) = lab.cache.glob("features/*/lock")
            at_work.enter_context(FolderLock(lock.parent / "parts" / "1" / "lock").hold())
        if now[0] == 100:
            at_work.close()

    monkeypatch.setattr(stored_head, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    lab.prepare(lab.train, local_rank=0, world_size=3, local_size=3)
    assert 100 + stored_head._LATE_S <= now[0] < 105 + stored_head._LATE_S and len(lab.logged()) == 5
