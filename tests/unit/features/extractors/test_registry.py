"""Built-in and registered extractors: what is listed, what is built, and what a broken package does to the others."""

import sys
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import Extractor, ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors import registry
from f3rm_ext.features.extractors.registry import available_extractors, build_extractor, extractor_name
from f3rm_ext.features.extractors.weights import WeightsStatus

CPU = torch.device("cpu")
BUILT_IN = ["clip", "dino", "dinov2", "labels", "moco", "dense-daisy"]


@dataclass
class TinyConfig:
    dim: int = 2


class TinyExtractor:
    """A tiny extractor.

    More about it.
    """

    config_class = TinyConfig

    def __init__(self, config: TinyConfig, *, device: torch.device) -> None:
        self.config, self.device = config, device

    @classmethod
    def weights_status(cls, config: TinyConfig) -> WeightsStatus:
        return WeightsStatus(path=None, advice=f"Lacks {config.dim}.", missing=True)

    identity = ExtractorIdentity("tiny", "none", "none", "none", "none")
    batch_size = 1

    @property
    def dim(self) -> int:
        return self.config.dim

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        return PatchGrid.covering(1, 1, height_px, width_px)

    def extract(self, images):
        return [torch.zeros(1, 1, self.dim) for _ in images]


class NeedsMissingPackage(TinyExtractor):
    def __init__(self, config: TinyConfig, *, device: torch.device) -> None:
        raise ModuleNotFoundError("No module named 'segmenter'")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch):
    """Registers entry points NAME = MODULE:ATTRIBUTE; the module `provided_extractors` holds the classes above."""
    module = types.ModuleType("provided_extractors")
    module.Tiny, module.NeedsMissing, module.number = TinyExtractor, NeedsMissingPackage, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "provided_extractors", module)

    def register(*points: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in points]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else []
        )

    register()
    return register


def test_built_in_extractors_are_listed(register) -> None:
    found = available_extractors()
    assert list(found) == BUILT_IN
    for name, info in found.items():
        assert info.name == name
        assert info.provider == "built in"
        assert not info.broken
        assert "\n" not in info.description


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_factories_keep_the_contract(name: str) -> None:
    factory = registry._factory(name)
    assert isinstance(factory, registry.ExtractorFactory)
    factory.config_class()  # Every option has a default.


def test_builds_with_options(register) -> None:
    extractor = build_extractor("dense-daisy:step_px=16", device=CPU)
    assert isinstance(extractor, Extractor)
    assert extractor.patch_grid(320, 320).rows == 20
    assert extractor_name("dense-daisy:step_px=16") == extractor.identity.extractor


def test_other_packages_add_extractors(register) -> None:
    register(("tiny", "provided_extractors:Tiny"))
    info = available_extractors()["tiny"]
    assert info.description == "A tiny extractor."
    assert info.weights_status("dim=9").advice == "Lacks 9."
    extractor = build_extractor("tiny:dim=5", device=CPU)
    assert extractor.extract([np.zeros((4, 4, 3), np.uint8)])[0].shape == (1, 1, 5)


def test_broken_package_is_reported_only_where_it_is_asked_for(register) -> None:
    register(
        ("absent", "no_such_module_of_anyone:X"),
        ("nothing", "provided_extractors:Nothing"),
        ("number", "provided_extractors:number"),
        ("tiny", "provided_extractors:Tiny"),
    )
    found = available_extractors()
    assert [name for name, info in found.items() if info.broken] == ["absent", "nothing", "number"]
    assert "no_such_module_of_anyone" in found["absent"].description
    assert build_extractor("tiny", device=CPU).dim == 2
    assert build_extractor("dense-daisy", device=CPU).dim > 0
    for name in ("absent", "nothing", "number"):
        with pytest.raises(ExtractorError, match=name):
            build_extractor(name, device=CPU)
        with pytest.raises(ExtractorError, match=name):
            found[name].weights_status()


def test_missing_package_of_an_extractor_is_named(register) -> None:
    register(("needy", "provided_extractors:NeedsMissing"))
    with pytest.raises(ExtractorError, match=r"needy .*segmenter.*install"):
        build_extractor("needy", device=CPU)


def test_name_registered_twice_is_refused_when_used(register) -> None:
    register(("tiny", "provided_extractors:Tiny"), ("tiny", "provided_extractors:NeedsMissing"))
    assert available_extractors()["tiny"].broken
    with pytest.raises(ExtractorError, match="uninstall"):
        build_extractor("tiny", device=CPU)


def test_one_entry_point_seen_twice_is_one(register) -> None:
    register(("tiny", "provided_extractors:Tiny"), ("tiny", "provided_extractors:Tiny"))
    assert build_extractor("tiny", device=CPU).dim == 2


def test_built_in_names_cannot_be_taken(register) -> None:
    register(("dense-daisy", "provided_extractors:Tiny"))
    assert available_extractors()["dense-daisy"].provider == "built in"
    assert build_extractor("dense-daisy", device=CPU).identity.extractor == "dense-daisy"


def test_unknown_name_lists_known_ones_and_the_closest(register) -> None:
    register(("tiny", "provided_extractors:Tiny"))
    with pytest.raises(ExtractorError) as caught:
        build_extractor("dinov3:weights=x", device=CPU)
    assert "'dinov3'" in str(caught.value)
    assert "dinov2?" in str(caught.value)
    for name in [*BUILT_IN, "tiny"]:
        assert name in str(caught.value)


def test_unknown_option_lists_known_ones(register) -> None:
    with pytest.raises(ExtractorError, match=r"dense-daisy.*'steps'.*short_side_px.*step_px.*radius_px"):
        build_extractor("dense-daisy:steps=3", device=CPU)
