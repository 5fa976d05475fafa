"""``f3rm-ext features lift-mesh``: 2D features onto the vertices of a mesh."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.common import MeshPhotos, measured_cost, require_own_file
from f3rm_ext.utils.console import image_progress, say, show_stages

if TYPE_CHECKING:
    from f3rm_ext.features.base import FeatureMap


@dataclass(kw_only=True)
class LiftMesh(MeshPhotos):
    """Lift 2D features onto a mesh from the photos of its capture, without training.

    Each vertex takes the mean of the features where photos see it, with the weights of `f3rm-ext export texture`.
    Vertices that no photo sees take the feature of the nearest one along the surface. The features are written beside
    the mesh, room.ply.features.npz for room.ply, and belong to that mesh only. The mesh then answers f3rm-ext query,
    eval query and export features with --mesh, and f3rm-ext export part cuts out what a query finds.

    Typical calls:
      f3rm-ext features lift-mesh --mesh room.ply --data room --extractors clip --codes 64
      f3rm-ext features lift-mesh --mesh room.ply --load-config .../config.yml
      f3rm-ext features lift-mesh --mesh room.glb --data room --extractors clip dinov2 --codes 64 --code-map
    """

    mesh: Path
    """The mesh: .ply, .obj, .glb, .stl, or .npz with vertices and faces."""
    extractors: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--extractor"])] = ()
    """Extractors, each written as NAME or NAME:key=value,key=value; `f3rm-ext doctor` lists the names. By default those
    of the run."""
    codes: int | None = None
    """Number of PCA codes to lift instead of the full features, 8 to 512. 0 lifts the full features, which take 2 bytes
    per vertex and dimension. By default that of the run, else 0."""
    cache_dir: Path | None = None
    """Folder of the feature store; by default that of the run, else as in `f3rm-ext features extract`."""
    per_group: bool = True
    """Draw the feature of each vertex halfway towards the mean of its group (`f3rm-ext query --list`), so that a query
    outlines whole things. Without it, queries find parts of a group more easily."""
    code_map: bool = False
    """Also lift onto the texels of a textured mesh, as numbers of a dictionary: for meshes whose triangles are larger
    than things."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_config is None and not self.extractors:
            raise ConfigError("No extractor is given: name one, e.g. --extractors clip.")

    def main(self) -> int:
        import torch

        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.mesh.mesh_files import find_frame, read_mesh
        from f3rm_ext.mesh.semantics.code_map import lift_code_map, texture_side
        from f3rm_ext.mesh.semantics.feature_file import MeshFeatures, features_path, save_features
        from f3rm_ext.mesh.semantics.lifting import lift_vertices
        from f3rm_ext.mesh.semantics.mesh_run import open_capture_manager
        from f3rm_ext.mesh.texture.photos import dataset_photos
        from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads

        mesh, out = read_mesh(self.mesh), features_path(self.mesh)
        if self.code_map:
            texture_side(mesh)  # before the work begins
        require_own_file(out, "f3rm-ext features lift-mesh")
        manager = open_capture_manager(
            self.load_config, self.data, extractors=self.extractors, codes=self.codes, cache_dir=self.cache_dir
        )
        data = Path(manager.dataparser.config.data)
        frames = CaptureFrame.from_outputs(manager.train_dataparser_outputs, data)
        frame = find_frame(self.mesh, self.frame, lambda: frames)
        photos = dataset_photos(manager.train_dataset, frames if frame == "capture" else None)
        source = manager.prepare_features(with_train=True)[0]
        if not source.specs:
            raise ConfigError(f"The run {self.load_config} has no extractors: name one, e.g. --extractors clip.")
        heads, maps = LiftedHeads(), {}
        with measured_cost() as cost, image_progress("photos") as progress:
            for spec in source.specs:

                def load(index: int, name: str = spec.name) -> "FeatureMap":
                    return source.load(index)[name]

                show = show_stages(progress)
                lifted = lift_vertices(mesh, photos, load, spec.dim, show, per_group=self.per_group)
                heads.add(LiftedHead(spec, torch.from_numpy(lifted.codes), torch.from_numpy(lifted.groups)))
                if self.code_map:
                    maps[spec.name] = lift_code_map(mesh, photos, load, spec.dim, show)
        unseen = int((~lifted.visible).sum())
        record = {
            "mesh": str(self.mesh.resolve()),
            "data": str(data.resolve()),
            "load_config": None if self.load_config is None else str(self.load_config.resolve()),
            "extractors": [spec.extractor for spec in source.specs],
            "cache_dir": str(manager.config.features.cache_dir) if manager.config.features.cache_dir else None,
            "frame": frame,
            **frames.describe(),
            "unseen": unseen,
            **cost,
        }
        save_features(out, mesh, MeshFeatures(heads, lifted.visible, maps, record))
        lines = [
            f"{name}: {head.dim} dimensions on {len(head.codes)} vertices ({head.codes.nbytes / 2**20:.1f} MiB)"
            + (f" and {len(maps[name].dictionary)} codes on texels" if name in maps else "")
            + f" are in {out}."
            for name, head in heads.to_dict().items()
        ]
        if unseen:
            lines.append(
                f"No photo sees {unseen} of {len(mesh.vertices)} vertices: they have the features of the "
                "nearest ones along the surface."
            )
        say(*lines)
        return 0
