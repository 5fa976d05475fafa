"""Exemplar queries: a piece of a photo is the question, the places that look like it are the answer.

They work with any extractor, whether it understands text or not.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import sample_map

if TYPE_CHECKING:
    from f3rm_ext.nerf.model import F3rmModel

MIN_NORM = 1e-8
"""Vectors shorter than this have no direction."""


@dataclass(frozen=True)
class Exemplar:
    """A question to a feature field, and where it was taken from."""

    head: str
    """Name of the feature (head) in whose space the vector lies."""
    vector: Float[Tensor, "feat"]
    """What to look for, unit norm, float32 on the CPU."""
    image: str
    """File name of the photo."""
    yx_px: tuple[float, float]
    """Where in the photo, continuous pixel coordinates (y, x); centres of pixels lie at + ½."""


def exemplar_at(head: str, feature_map: FeatureMap, yx_px: tuple[float, float], *, image: str = "") -> Exemplar:
    """The exemplar at a pixel of a photo, interpolated between the patches around it.

    Args:
        head: name of the feature.
        feature_map: of the photo, in the distilled space.
        yx_px: continuous pixel coordinates (y, x) in the photo.
        image: the photo's file name, for the record.

    Raises:
        ConfigError: the feature there is zero, so that nothing can be compared with it.
    """
    sampled = sample_map(feature_map, np.asarray([yx_px], dtype=np.float32))[0]
    vector = torch.from_numpy(sampled).float()
    norm = float(vector.norm())
    if not norm > MIN_NORM:
        raise ConfigError(
            f"The {head} feature at x = {yx_px[1]:g}, y = {yx_px[0]:g} of {image or 'the image'} is zero, so nothing "
            "can be compared with it: choose another place."
        )
    return Exemplar(head=head, vector=vector / norm, image=image, yx_px=(float(yx_px[0]), float(yx_px[1])))


@torch.inference_mode()
def similarity_images(
    model: "F3rmModel", camera: Cameras, head: str, vectors: Float[Tensor, "queries feat"]
) -> Float[Tensor, "h w queries"]:
    """Cosine similarity of the rendered feature of every pixel with each of several vectors.

    Features are compared chunk of rays by chunk of rays and never kept: memory grows with h x w x queries, whatever
    the dimension of the features.

    Args:
        model: a model with that head.
        camera: one camera.
        head: name of the feature.
        vectors: in the distilled space, of any norm.

    Returns:
        Values in [-1, 1] on the camera's device; 0 where the rendered feature or the vector is zero.

    Raises:
        ConfigError: the model has no such head, or its features have another dimension.
    """
    wanted = _checked(model, head, vectors)

    def compare(rays: RayBundle) -> dict[str, Tensor | list]:
        return {"similarity": _unit(model.render_features(rays)[head]) @ wanted.T}

    rays = camera.to(model.device).generate_rays(camera_indices=0, keep_shape=True)
    return model.chunked.render(rays, compare, model.device)["similarity"].clamp(-1.0, 1.0).to(camera.device)


@torch.inference_mode()
def render_with_similarity(
    model: "F3rmModel", camera: Cameras, head: str, vectors: Float[Tensor, "queries feat"]
) -> dict[str, Tensor]:
    """Everything the model renders, and ``similarity`` (h, w, queries) beside it, in one pass over the rays.

    Args:
        model: the model.
        camera: one camera.
        head: name of the feature; empty to ask for nothing, which gives no queries.
        vectors: as for :func:`similarity_images`.
    """
    if not head:
        outputs = model.get_outputs_for_camera(camera)
        return {**outputs, "similarity": outputs["rgb"].new_zeros(*outputs["rgb"].shape[:2], 0)}
    wanted = _checked(model, head, vectors)
    # The names under which a model outputs its features: the first head's has no suffix.
    full = [f"feature_{name}" if index else "feature" for index, name in enumerate(model.feature_field.names)]
    key = full[model.feature_field.names.index(head)]
    kept = model.config.output_features

    def compare(rays: RayBundle) -> dict[str, Tensor | list]:
        outputs: dict[str, Any] = dict(model.forward(rays))
        similarity = (_unit(outputs[key]) @ wanted.T).clamp(-1.0, 1.0)
        for name in () if kept else full:
            outputs.pop(name, None)
        return {**outputs, "similarity": similarity}

    model.config.output_features = True
    try:
        rays = camera.to(model.device).generate_rays(camera_indices=0, keep_shape=True)
        return model.chunked.render(rays, compare, model.device)
    finally:
        model.config.output_features = kept


def similarity_image(
    model: "F3rmModel", camera: Cameras, head: str, vector: Float[Tensor, "feat"]
) -> Float[Tensor, "h w"]:
    """Cosine similarity of the rendered feature of every pixel with one vector; see :func:`similarity_images`."""
    return similarity_images(model, camera, head, vector[None])[..., 0]


def best_pixel(similarity: Float[Tensor, "h w"]) -> tuple[int, int]:
    """Row and column of the pixel most like the exemplar; the first one of equals."""
    row, col = divmod(int(similarity.flatten().argmax()), similarity.shape[1])
    return row, col


def intersection_over_union(found: Bool[Tensor, "h w"], true: Bool[Tensor, "h w"]) -> float:
    """Pixels in both masks over pixels in either; 0 where both are empty."""
    return int((found & true).sum()) / max(1, int((found | true).sum()))


def _checked(model: "F3rmModel", head: str, vectors: Float[Tensor, "queries feat"]) -> Float[Tensor, "queries feat"]:
    """Unit vectors on the model's device; see :func:`similarity_images` for what is refused."""
    names = model.feature_field.names
    if head not in names:
        has = ", ".join(names) or "none"
        raise ConfigError(f"The model has no feature {head!r}: choose from those it has ({has}).")
    dim = model.feature_field.head(head).dim
    if vectors.shape[1] != dim:
        raise ConfigError(
            f"The query has {vectors.shape[1]} dimensions, but the feature {head!r} has {dim}: "
            "take the query from features of the same extractor and number of codes."
        )
    return _unit(vectors.to(model.device, torch.float32))


def _unit(vectors: Float[Tensor, "n feat"]) -> Float[Tensor, "n feat"]:
    return functional.normalize(vectors, dim=-1, eps=MIN_NORM)
