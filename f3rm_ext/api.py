"""The public functions: open what was trained, ask it, render it, mesh it; poses and features of photos.

``import f3rm_ext`` offers everything here without importing torch until it is used.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.compat import open_device
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.options import QueryInputs, parse_queries
from f3rm_ext.query.run import Photos, Run, load_run, photo_views, read_camera_path
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.ranges import Range

if TYPE_CHECKING:
    import trimesh

T = TypeVar("T")


@dataclass(frozen=True)
class Match:
    """How well one view fits a query, and its best pixel."""

    view: str
    """Name of the view: that of its photo without suffix, or ``frame-00000`` along a camera path."""
    camera: Cameras = field(repr=False)
    """One camera, scene frame, on the CPU."""
    score: float
    """Score of the best pixel: relevancy, 0 to 1, or cosine, -1 to 1, for a query without negatives."""
    pixel: tuple[float, float]
    """Centre (x, y) of the best pixel, px."""
    position: tuple[float, float, float] | None
    """Where its ray meets a surface, in the frame and units of the capture; None where it meets none."""
    scores: Float32[np.ndarray, "h w"] = field(repr=False)
    """Score of every pixel."""
    rgb: UInt8[np.ndarray, "h w 3"] = field(repr=False)
    """The rendered view."""


class Scene:
    """A trained run, or a mesh with features, opened by :func:`load`."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos
        """The model in evaluation mode, its photos, and their features: for what this class has no method for."""
        self.frame = photos.frame
        """The map between the scene frame and that of the capture."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that can be queried; the first is the default."""
        return tuple(self.photos.model.query_heads())

    def cameras(self, split: str = "test") -> Cameras:
        """Returns the cameras of the training or of the held-out photos, scene frame.

        Args:
            split: ``train`` or ``test``.

        Raises:
            ConfigError: the capture has no held-out photos, or the split is another.
        """
        if split not in ("train", "test"):
            raise ConfigError(f"There is no split {split!r}: give train or test.")
        return self.photos.cameras(split)

    def query(
        self,
        text: str | None = None,
        *,
        example: str | None = None,
        vector: Path | str | None = None,
        negatives: Iterable[str] | str = (),
        feature: str = "",
        temperature: float = 0.1,
        views: Path | str = "auto",
        scale: float = 1.0,
    ) -> list[Match]:
        """Scores every pixel of some views: the relevancy of LERF (Kerr et al. 2023), or the cosine.

        Args:
            text: What to look for; ``banana | plantain`` for alternatives. The feature must understand text, as CLIP
                does.
            example: A place in an image instead of a text: ``IMAGE:x,y``, ``IMAGE:x,y,w,h`` or ``IMAGE``, in pixels.
                IMAGE is a photo of the capture or any image file.
            vector: A .npy file of vectors of the feature space instead of a text.
            negatives: Texts to tell it from; ``["none"]`` gives plain cosines. By default a text is compared with
                ``object``, ``things``, ``stuff`` and ``texture``, an example with what else the scene and its
                image show.
            feature: Which feature to ask; by default the first of :attr:`features`.
            temperature: Temperature of the relevancy, above 0.
            views: ``test``, ``train`` or ``all`` photos, the name of one photo, or a camera path of the viewer (.json);
                ``auto`` takes the test photos, or those of training where none is held out.
            scale: Factor of the image size, above 0.

        Returns:
            One match for each view, the best first. Each holds 7 bytes per pixel.

        Raises:
            ConfigError: There is no such view, feature or image, or not exactly one thing to look for.
            ExtractorError: The feature understands no text, or its weights are missing.
        """
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.query.render import score_views, summarize_view

        if sum(given is not None for given in (text, example, vector)) != 1:
            raise ConfigError("A query looks for one thing: give either a text, an example or a vector.")
        _check_positive(scale=scale)
        inputs = QueryInputs(
            text=() if text is None else (text,),
            exemplar=() if example is None else (example,),
            vector=() if vector is None else (str(vector),),
            negative=(negatives,) if isinstance(negatives, str) else tuple(negatives),
            feature=feature,
            temperature=temperature,
        )
        if str(views).endswith(".json"):
            wanted = read_camera_path(Path(views)).views(scale)
        else:
            wanted = photo_views(self.photos, str(views), scale)
        queries = encode_queries(parse_queries(inputs), self.photos)
        matches = []
        for scored in score_views(self.photos.model, wanted, queries):
            (best,) = summarize_view(scored, queries, inputs.threshold, self.frame).values()
            place = best["best_at_capture"]
            matches.append(
                Match(
                    view=scored.view.name,
                    camera=scored.view.camera,
                    score=best["best_score"],
                    pixel=tuple(best["best_px"]),
                    position=None if place is None else tuple(place),
                    scores=scored.scores[..., 0],
                    rgb=scored.rgb,
                )
            )
        return sorted(matches, key=lambda match: -match.score)

    def render(self, camera: Cameras) -> dict[str, Float[Tensor, "h w _"]]:
        """Renders a camera, chunk by chunk, so that memory does not depend on the size of the image.

        Args:
            camera: One camera, scene frame, such as ``scene.cameras()[:1]``.

        Returns:
            Outputs by name, on the CPU: ``rgb`` (0 to 1), ``accumulation`` (0 to 1), ``depth`` and
            ``expected_depth`` (distance along the ray, scene units), and whatever else the model renders.

        Raises:
            ConfigError: There is not exactly one camera.
        """
        if camera.shape != (1,):
            raise ConfigError(
                f"One camera is rendered at a time, and there are {tuple(camera.shape)}: slice with [:1]."
            )
        outputs = self.photos.model.render_camera(camera.to(self.photos.model.device), {})
        return {name: values.cpu() for name, values in outputs.items()}

    def mesh(
        self,
        *,
        frame: str = "capture",
        resolution_scale: float = 1.0,
        on_progress: StageProgress = lambda stage, done, total: None,
        **options: Any,
    ) -> "trimesh.Trimesh":
        """Extracts a triangle mesh with colours at its vertices. A scene that is a mesh already is returned as it is.

        Args:
            frame: Coordinates of the vertices: ``capture`` for those of transforms.json, or ``scene`` for those of the
                model.
            resolution_scale: Factor on the size of the rendered views of a run, above 0.
            on_progress: Called with each stage and how far it is.
            options: Fields of :class:`~f3rm_ext.mesh.options.ExtractionOptions`, such as ``vertices=50_000``.

        Raises:
            ConfigError: The method needs Gaussians and the run is a field; options are given for a mesh; or there is no
                such frame.
            MeshError: There is no surface.
        """
        from f3rm_ext.mesh.extraction import extract_mesh
        from f3rm_ext.mesh.options import ExtractionOptions
        from f3rm_ext.mesh.scenes import run_scene

        if frame not in ("capture", "scene"):
            raise ConfigError(f"There is no frame {frame!r}: give capture or scene.")
        _check_positive(resolution_scale=resolution_scale)
        if isinstance(self.photos, Run):
            surface = run_scene(self.photos, resolution_scale)
            mesh = extract_mesh(surface, _make_options(ExtractionOptions, **options), on_progress).mesh
        elif options:
            raise ConfigError(f"This scene is a mesh already: leave out {', '.join(options)}.")
        else:
            mesh = self.photos.model.mesh.copy()
        if frame == "capture":
            mesh.vertices = self.frame.to_capture(np.asarray(mesh.vertices))
        return mesh


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if number not in Range(0, above=True):
            raise ConfigError(f"{name} is {number}: give a number {Range(0, above=True)}.")


def _make_options(kind: type[T], **options: Any) -> T:
    """Makes the options of a part from those given in Python, where paths may be words.

    Raises:
        ConfigError: there is no option of some name.
    """
    hints = get_type_hints(kind)
    for name, value in options.items():
        if name not in hints:
            raise ConfigError(f"There is no option {name!r}: choose from {', '.join(hints)}.")
        if isinstance(value, str) and Path in (hints[name], *get_args(hints[name])):
            options[name] = Path(value)
    return kind(**options)


def load(path: Path | str, data: Path | str | None = None) -> Scene:
    """Opens a trained run of any method of this package, or a mesh with features, on the GPU if there is one.

    Args:
        path: ``config.yml`` of a run, or the mesh that ``f3rm-ext features lift-mesh`` gave features.
        data: Where the capture of the mesh is now; by default where it was. A run knows its capture.

    Raises:
        ConfigError: There is no such file, or it is of another package.
        CheckpointError: The run has no checkpoint, or all are damaged.
        MeshError: The mesh has no features, or they are of another mesh.
    """
    path = Path(path)
    if path.suffix in (".yml", ".yaml"):
        if data is not None:
            raise ConfigError("A run knows its capture: give `data` only with a mesh.")
        return Scene(load_run(path))
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the config.yml of a run, or a mesh with features.")
    from f3rm_ext.mesh.semantics.mesh_run import open_mesh_run

    return Scene(open_mesh_run(path, None if data is None else Path(data)))


@dataclass(frozen=True)
class EstimatedPoses:
    """Camera poses of photos, from :func:`estimate_poses`."""

    capture: Path
    """The folder that was written, ready for ``ns-train --data``."""
    camera_to_world: dict[str, Float[np.ndarray, "4 4"]]
    """Pose of each photo by its path in the capture: OpenGL's axes, capture frame."""
    without_pose: dict[str, str]
    """Photos without a pose, and why."""
    doubt: str | None
    """What speaks against the poses; None if nothing does."""


def estimate_poses(
    images: Path | str,
    output: Path | str,
    *,
    on_progress: StageProgress = lambda stage, done, total: None,
    **options: Any,
) -> EstimatedPoses:
    """Finds out where each photo was taken, and writes a capture, as ``f3rm-ext sfm process`` does. Needs no training.

    It can be stopped at any time; called again, it resumes.

    Args:
        images: Folder of photos, or a video.
        output: Folder for the capture: a new one, or one that was begun before.
        on_progress: Called with each stage and how far it is.
        options: Fields of :class:`~f3rm_ext.sfm.config.ProcessConfig`, such as ``matching="sequential"``.

    Raises:
        ConfigError: An option cannot work, or the folder holds other files.
        CaptureError: No two photos fit together, or the poses are doubtful and those of an earlier capture are not.
    """
    from f3rm_ext.sfm.config import ProcessConfig
    from f3rm_ext.sfm.process import Processing
    from f3rm_ext.sfm.work_folder import TRANSFORMS

    config = _make_options(ProcessConfig, output=output, images=images, **options)
    result = Processing(config, on_progress, lambda sentence: None).run()
    frames = json.loads((config.output / TRANSFORMS).read_text(encoding="utf-8"))["frames"]
    poses = {frame["file_path"]: np.asarray(frame["transform_matrix"], dtype=np.float64) for frame in frames}
    return EstimatedPoses(config.output, poses, dict(result["without_pose"]), result["doubt"] or None)


def extract_features(
    images: Iterable[Path | str] | Path | str, extractor: str = "clip", *, device: torch.device | str | None = None
) -> list[FeatureMap]:
    """Extracts the patch features of image files, without a capture and without the feature store.

    Args:
        images: Files, or a folder of them.
        extractor: Name and options, such as ``dinov2`` or ``clip:model=ViT-L-14``; ``f3rm-ext doctor`` lists them.
        device: Where the network runs; by default the GPU if there is one.

    Returns:
        One map per image, in the order given (a folder's in that of the names): ``values`` (rows, cols, feat), float16,
        not normalised, and where the patches lie in the upright image.

    Raises:
        ConfigError: An image cannot be read, or there is no such device.
        ExtractorError: There is no such extractor, or its weights are missing.
    """
    from f3rm_ext.features.extractors.registry import build_extractor
    from f3rm_ext.query.encoders import extract_values, read_upright
    from f3rm_ext.sfm.photos import find_photos

    if isinstance(images, str | Path):
        images = find_photos(Path(images)) if Path(images).is_dir() else [images]
    built = build_extractor(extractor, device=open_device(str(device or "auto")))
    maps = []
    for path in map(Path, images):
        image = read_upright(path)
        values = extract_values(built, image, path)
        maps.append(FeatureMap(values.numpy().astype(np.float16), built.patch_grid(*image.shape[:2])))
    return maps
