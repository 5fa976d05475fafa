"""Lists the extractors, built in or from other packages, and builds one from its name and options."""

import dataclasses
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch

from f3rm_ext.errors import ExtractorError, reason_of
from f3rm_ext.features.base import Extractor, FeatureSize
from f3rm_ext.features.extractors.parsing import build_config, close_match, extractor_name
from f3rm_ext.features.extractors.weights import NO_WEIGHTS, WeightsStatus

__all__ = [
    "ExtractorInfo",
    "available_extractors",
    "build_extractor",
    "extractor_name",
    "feature_size",
    "understands_text",
    "weights_status",
]

ENTRY_POINT_GROUP = "f3rm_ext.extractors"

_BUILT_IN = {
    "clip": (
        "f3rm_ext.features.extractors.clip:ClipExtractor",
        "CLIP patch features with text queries (open_clip, MaskCLIP).",
    ),
    "dino": ("f3rm_ext.features.extractors.dino:DinoExtractor", "DINO ViT patch features (key facet, as F3RM)."),
    "dinov2": ("f3rm_ext.features.extractors.dino:Dinov2Extractor", "DINOv2 ViT patch features, also with registers."),
    "labels": (
        "f3rm_ext.features.extractors.labels:LabelsExtractor",
        "One-hot labels of a capture that has them, for tests.",
    ),
    "moco": ("f3rm_ext.features.extractors.moco:MocoExtractor", "A ResNet pre-trained on your own pictures."),
    "dense-daisy": (
        "f3rm_ext.features.extractors.daisy:DaisyExtractor",
        "Texture and colour without weights, for off-line use.",
    ),
}


@runtime_checkable
class ExtractorFactory(Protocol):
    """The object that an entry point of the group ``f3rm_ext.extractors`` names, usually the extractor's class.

    It may also have ``weights_status(config) -> WeightsStatus`` for ``doctor`` and ``feature_size(config, height_px,
    width_px) -> FeatureSize`` for plans, which must be cheap, work off-line and need no weights. ``resizes``
    is True for one that resizes images to a size of its own, see :func:`resizes`.
    """

    config_class: ClassVar[type]
    """Dataclass of the options, in which every field has a default."""

    def __call__(self, config: Any, *, device: torch.device) -> Extractor: ...


@dataclass(frozen=True)
class ExtractorInfo:
    """An extractor as ``doctor`` lists it."""

    name: str
    """Name to use in ``NAME:key=value``."""
    description: str
    """One line; for a broken extractor, the reason why it cannot be used."""
    provider: str
    """``built in``, or the package that registers the extractor."""
    broken: bool = False

    def weights_status(self, options: str = "") -> WeightsStatus:
        """See :func:`weights_status`; options as ``key=value,key=value``."""
        return weights_status(f"{self.name}:{options}")


def weights_status(text: str) -> WeightsStatus:
    """Tells whether the weights of an extractor are on this machine, off-line and without loading them.

    Raises:
        ExtractorError: A name, an option or a value is wrong, or the extractor is broken.
    """
    factory = _factory(extractor_name(text))
    config = build_config(factory.config_class, text)
    check = getattr(factory, "weights_status", None)
    return NO_WEIGHTS if check is None else check(config)


def build_extractor(text: str, *, device: torch.device) -> Extractor:
    """Builds an extractor from what the user wrote: ``NAME`` or ``NAME:key=value,key=value``.

    Raises:
        ExtractorError: A name, an option or a value is wrong, or the package that provides the extractor is broken.
        WeightsNotFoundError: The weights are not on this machine and cannot be fetched.
    """
    name = extractor_name(text)
    factory = _factory(name)
    config = build_config(factory.config_class, text)
    try:
        return factory(config, device=device)
    except ImportError as error:
        raise ExtractorError(
            f"Extractor {name} needs a package that cannot be imported ({reason_of(error)}): install it."
        ) from error


def feature_size(text: str, height_px: int, width_px: int) -> FeatureSize:
    """Tells the size of the features of an image, without weights where the extractor can.

    >>> feature_size("clip:model=ViT-B-16,short_side_px=64", height_px=90, width_px=160)
    FeatureSize(rows=4, cols=7, dim=512)
    """
    factory = _factory(extractor_name(text))
    tell = getattr(factory, "feature_size", None)
    if tell is not None:
        return tell(build_config(factory.config_class, text), height_px, width_px)
    extractor = build_extractor(text, device=torch.device("cpu"))
    grid = extractor.patch_grid(height_px, width_px)
    return FeatureSize(grid.rows, grid.cols, extractor.dim)


def resizes(text: str) -> bool:
    """Tells whether an extractor resizes images to a size of its own; it is given the photos at full size then.

    >>> resizes("clip"), resizes("labels"), resizes("unknown")
    (True, False, False)
    """
    try:
        return bool(getattr(_factory(extractor_name(text)), "resizes", False))
    except ExtractorError:
        return False


def understands_text(text: str) -> bool:
    """Tells whether an extractor can embed text into its feature space, without its weights.

    >>> understands_text("clip:model=ViT-B-16"), understands_text("dinov2")
    (True, False)
    """
    return hasattr(_factory(extractor_name(text)), "encode_text")


def available_extractors() -> dict[str, ExtractorInfo]:
    """Returns all extractors by name, built-in ones first; the description of a broken one gives the reason."""
    result = {name: ExtractorInfo(name, text, "built in") for name, (_, text) in _BUILT_IN.items()}
    for name, points in sorted(_entry_points().items()):
        if name in result:
            continue
        provider = " and ".join(_provider(point) for point in points)
        try:
            lines = (getattr(_factory(name), "__doc__", None) or "").strip().splitlines()
            description, broken = lines[0] if lines else "No description.", False
        except ExtractorError as error:
            description, broken = str(error), True
        result[name] = ExtractorInfo(name, description, provider, broken)
    return result


def _entry_points() -> Mapping[str, list[EntryPoint]]:
    """Returns the entry points of other packages by name; a package found twice on the path counts once."""
    result: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        others = result.setdefault(point.name, [])
        if all(point.value != other.value for other in others):
            others.append(point)
    return result


def _factory(name: str) -> ExtractorFactory:
    if name in _BUILT_IN:
        return cast(ExtractorFactory, pkgutil.resolve_name(_BUILT_IN[name][0]))
    registered = _entry_points()
    points = registered.get(name, [])
    if not points:
        known = list(dict.fromkeys([*_BUILT_IN, *sorted(registered)]))
        raise ExtractorError(
            f"There is no extractor '{name}'{close_match(name, known)}: known ones are {', '.join(known)}."
        )
    if len(points) > 1:
        raise ExtractorError(
            f"Extractor {name} is registered by {' and '.join(map(_provider, points))}: uninstall all but one."
        )
    provider = _provider(points[0])
    try:
        factory = points[0].load()
    except Exception as error:
        raise ExtractorError(
            f"Extractor {name} of {provider} cannot be loaded ({type(error).__name__}: {reason_of(error)}): "
            "mend or uninstall that package."
        ) from error
    if not callable(factory) or not dataclasses.is_dataclass(getattr(factory, "config_class", None)):
        raise ExtractorError(
            f"Extractor {name} of {provider} ({points[0].value}) is not callable or has no dataclass config_class: "
            "mend or uninstall that package."
        )
    return cast(ExtractorFactory, factory)


def _provider(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
