"""A mesh opened for queries as a run is, with its capture; and the capture whose features are lifted onto a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import trimesh

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.image_datamanager import ImageDataManager, ImageDataManagerConfig, LiftedFeatureOptions
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import read_mesh, same_frame
from f3rm_ext.mesh.semantics.feature_file import MeshFeatures, features_path, load_features
from f3rm_ext.mesh.semantics.model import QueryableMesh
from f3rm_ext.query.run import Photos, load_run


@dataclass
class MeshRun(Photos):
    """A mesh with features and the capture they were lifted from."""

    mesh: Path
    """File of the mesh."""
    features: Path
    """The file of its features."""

    def describe(self) -> dict[str, object]:
        """Returns the mesh and its features as JSON, for files that hold results."""
        return {"mesh": str(self.mesh.resolve()), "features": str(self.features.resolve())}


def open_run_or_mesh(load_config: Path | None, mesh: Path | None, data: Path | None) -> Photos:
    """Opens what is to be queried: the mesh if there is one, see :func:`open_mesh_run`, else the run of a config.yml.
    Raises UserError where that fails."""
    if mesh is not None:
        return open_mesh_run(mesh, data)
    assert load_config is not None
    return load_run(load_config)


def read_featured_mesh(path: Path) -> tuple[trimesh.Trimesh, MeshFeatures]:
    """Reads a mesh, in the coordinates of its file but z up, and the features beside it. Raises MeshError as
    :func:`~f3rm_ext.mesh.mesh_files.read_mesh` and :func:`load_features`."""
    mesh = read_mesh(path)
    return mesh, load_features(features_path(path), mesh)


def open_mesh_run(path: Path, data: Path | None = None) -> MeshRun:
    """Opens a mesh with features; data is where its capture is now, None for where it was.

    Raises:
        UserError: the mesh, its features or its capture cannot be used, or the capture is another one.
    """
    mesh, features = read_featured_mesh(path)
    record = features.provenance
    specs = [head.spec for head in features.heads.to_dict().values()]
    codes = [0 if spec.code_basis is None else len(spec.code_basis) for spec in specs]
    config = None if data is not None or record.get("load_config") is None else Path(record["load_config"])
    manager = open_capture_manager(
        config,
        None if config is not None else data or Path(record["data"]),
        extractors=[spec.extractor for spec in specs],
        codes=max(codes),
        cache_dir=None if record.get("cache_dir") is None else Path(record["cache_dir"]),
    )
    frame = CaptureFrame.from_outputs(manager.train_dataparser_outputs, Path(manager.dataparser.config.data))
    if not same_frame(record, frame):
        raise MeshError(
            f"The cameras of {manager.dataparser.config.data} are not those from which the features of {path} were "
            "lifted, so they would look elsewhere: give the right capture with --data, or lift the features again."
        )
    if record["frame"] == "capture":
        mesh.vertices = frame.to_scene(np.asarray(mesh.vertices))
    model = QueryableMesh(mesh, features.heads, features.maps)
    return MeshRun(model, manager, path, features_path(path))


def open_capture_manager(
    load_config: Path | None,
    data: Path | None,
    *,
    extractors: Sequence[str] = (),
    codes: int | None = None,
    cache_dir: Path | None = None,
) -> ImageDataManager:
    """Opens the photos of a run, as its dataparser reads them, or of a capture. No checkpoint is needed.

    Args:
        load_config: config.yml of the run; None for a capture.
        data: the capture; None for that of the run.
        extractors: which 2D features to use; none for those of the run.
        codes: number of PCA codes; None for that of the run.
        cache_dir: folder of the feature store; None for that of the run.

    Raises:
        UserError: the capture or the run cannot be used.
    """
    from f3rm_ext.compat import default_device_type
    from f3rm_ext.engine.config_file import read_config

    if load_config is not None:
        manager: Any = read_config(load_config).pipeline.datamanager
        options = getattr(manager, "features", LiftedFeatureOptions())
        config = ImageDataManagerConfig(
            data=Path(manager.data or manager.dataparser.data),
            dataparser=manager.dataparser,
            camera_res_scale_factor=getattr(manager, "camera_res_scale_factor", 1.0),
        )
    else:
        config = ImageDataManagerConfig(data=data, dataparser=CaptureDataParserConfig())
        options = config.features
    config.features = LiftedFeatureOptions(
        tuple(extractors) or options.extractors,
        cache_dir or options.cache_dir,
        options.codes if codes is None else codes,
    )
    return cast(ImageDataManager, config.setup(device=default_device_type(), test_mode="test"))
