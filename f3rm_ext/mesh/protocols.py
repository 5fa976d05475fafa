"""What is compared, under the conventions of benchmarks.

- ``plain``: points spread evenly over both meshes. Distances are measured to all of the other surface.
- ``dtu`` (Jensen et al. 2014, as the evaluation script in Python has it): points 0.2 mm apart, within the observation
  mask (accuracy) and above the ground plane (completeness); distances of 20 mm and more do not count. Millimetres.
- ``tanks-and-temples`` (Knapitsch et al. 2017): both clouds are cropped to a polygon's volume and down-sampled to
  voxels of half the threshold. Metres as scanned; the published scripts then also align by ICP, here only on request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, no_type_check

import numpy as np
import trimesh
from jaxtyping import Bool, Float
from numba import njit
from scipy.spatial import KDTree

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.mesh_files import Corner, SurfacePoints, box_mask, surface_points
from f3rm_ext.mesh.metrics import Comparison, sample_mesh
from f3rm_ext.mesh.open3d_conversion import point_cloud
from f3rm_ext.utils.open3d_library import RayCaster, open3d

Protocol = Literal["plain", "dtu", "tanks-and-temples"]
Surface = trimesh.Trimesh | SurfacePoints
DTU_SPACING_MM, DTU_PATCH_MM, DTU_OUTLIER_MM = 0.2, 60.0, 20.0
TANKS_THRESHOLDS = {
    **{"Barn": 0.01, "Caterpillar": 0.005, "Church": 0.025, "Courthouse": 0.025},
    **{"Ignatius": 0.003, "Meetingroom": 0.01, "Truck": 0.005},
}
"""Distance at which each scene of Tanks and Temples is scored, its own units."""
_POINTS_PER_SPACING = 2.0
"""Samples per square of the spacing, before points that are too close are removed."""
_MOST_VOXELS = 2**31 - 1
"""Along an axis; Open3D numbers them by int32."""
_MOST_SAMPLES = 40_000_000


@dataclass(frozen=True)
class DtuMasks:
    """Parts of space in which a reconstruction of a DTU scan is judged."""

    observed: Bool[np.ndarray, "nx ny nz"]
    """Voxels that the scanner saw."""
    box: Float[np.ndarray, "2 3"]
    """Lowest and highest corner of the voxels, mm."""
    voxel_mm: float
    """Side of a voxel."""
    plane: Float[np.ndarray, "4"] | None
    """Ground plane: points with ⟨plane, (x, y, z, 1)⟩ > 0 are above it; None counts all."""

    @classmethod
    def read(cls, observed: Path, plane: Path | None) -> "DtuMasks":
        """Reads ObsMask*.mat and Plane*.mat. Raises ConfigError where one cannot be read."""
        mask = _read_mat(observed, ("ObsMask", "BB", "Res"))
        ground = None if plane is None else _read_mat(plane, ("P",))["P"].reshape(4)
        return cls(mask["ObsMask"].astype(bool), mask["BB"].astype(np.float64), float(mask["Res"].item()), ground)

    def near(self, points: Float[np.ndarray, "points 3"]) -> Bool[np.ndarray, " points"]:
        """Returns which points lie in the box, widened by a patch below and two above, as the script has it."""
        low, high = self.box[0] - DTU_PATCH_MM, self.box[1] + 2 * DTU_PATCH_MM
        return ((points >= low) & (points < high)).all(axis=1)

    def counts(self, points: Float[np.ndarray, "points 3"]) -> Bool[np.ndarray, " points"]:
        """Returns which points lie in observed voxels."""
        places = np.around((points - self.box[0]) / self.voxel_mm).astype(np.int64)
        inside = ((places >= 0) & (places < self.observed.shape)).all(axis=1)
        places[~inside] = 0
        return inside & self.observed[tuple(places.T)]

    def above(self, points: Float[np.ndarray, "points 3"]) -> Bool[np.ndarray, " points"]:
        """Returns which points lie above the ground plane."""
        if self.plane is None:
            return np.ones(len(points), bool)
        return points @ self.plane[:3] + self.plane[3] > 0


def plain_comparison(
    surface: Surface, truth: Surface, count: int, low: Corner = None, high: Corner = None
) -> Comparison:
    """Compares points spread evenly over both surfaces; given points are taken as they are.

    Args:
        count: points on each mesh; with a box, as many again on the faces in it, so that small parts are not left to
            the few points that fall on them.
        low: lowest corner of the box in which points count; None for no limit.
    """
    nearby, eligible = [], []
    for seed, part in enumerate((surface, truth)):
        points = inside = part if isinstance(part, SurfacePoints) else sample_mesh(part, count, seed)
        if isinstance(part, trimesh.Trimesh) and (low or high):
            corners = part.triangles
            touching = box_mask(corners.max(axis=1), low, None) & box_mask(corners.min(axis=1), None, high)
            within = part.submesh([np.flatnonzero(touching)], append=True, repair=False)
            if isinstance(within, trimesh.Trimesh) and 0 < len(within.faces) < len(part.faces) and within.area > 0:
                inside = sample_mesh(within, count, seed + 2)
                assert points.normals is not None and inside.normals is not None
                positions = np.concatenate([points.positions, inside.positions])
                points = SurfacePoints(positions, np.concatenate([points.normals, inside.normals]))
        nearby.append(points)
        eligible.append(inside.take(box_mask(inside.positions, low, high)))
    return Comparison(*eligible, *nearby)


def dtu_comparison(surface: Surface, truth: Surface, masks: DtuMasks) -> Comparison:
    """Compares as DTU's evaluation does; millimetres."""
    ours, theirs = (_dense(part, DTU_SPACING_MM) for part in (surface, truth))
    ours = thin_out(ours, DTU_SPACING_MM)
    if isinstance(truth, trimesh.Trimesh):  # scans are taken as they are, as the script does
        theirs = thin_out(theirs, DTU_SPACING_MM)
    nearby = ours.take(masks.near(ours.positions))
    return Comparison(
        surface=nearby.take(masks.counts(nearby.positions)),
        truth=theirs.take(masks.above(theirs.positions)),
        near_surface=nearby,
        near_truth=theirs,
        max_distance=DTU_OUTLIER_MM,
    )


def tanks_comparison(surface: Surface, truth: Surface, crop: Path | None, threshold: float) -> Comparison:
    """Compares as the scripts of Tanks and Temples do, except for their alignment.

    Args:
        surface: in the frame of the truth.
        crop: polygon of the scene (.json); None crops nothing.
        threshold: τ of the scene.
    """
    parts = []
    for part in (surface, truth):
        points = _dense(part, threshold / 2)
        points = points if crop is None else points.take(volume_mask(points, crop))
        parts.append(voxel_means(points, threshold / 2))
    return Comparison(*parts, *parts)


def volume_mask(points: SurfacePoints, crop: Path) -> Bool[np.ndarray, " points"]:
    """Returns which points lie in the volume of a polygon file (.json) of Tanks and Temples or Open3D.

    Raises ConfigError where the file cannot be read.
    """
    if not crop.is_file():
        raise ConfigError(f"There is no file {crop}: give the .json of a polygon with --crop.")
    volume = open3d().visualization.read_selection_polygon_volume(str(crop))
    if not volume.orthogonal_axis:
        raise ConfigError(f"{crop} holds no polygon of Open3D's format: give the .json that comes with the scan.")
    inside = np.zeros(len(points), bool)
    inside[np.asarray(volume.crop_in_polygon(point_cloud(points.positions)), dtype=np.int64)] = True
    return inside


def voxel_means(points: SurfacePoints, side: float) -> SurfacePoints:
    """Returns the mean of the points, and of their normals, in each voxel of a grid.

    Raises:
        MeshError: the voxels are too small to be numbered.
    """
    extent = float(np.ptp(points.positions, axis=0).max(initial=0.0)) if len(points) else 0.0
    if not side * _MOST_VOXELS > extent:
        raise MeshError(
            f"Voxels of {side:g} are too small for points {extent:g} apart: raise --thresholds, or remove stray points."
        )
    reduced = point_cloud(points.positions, points.normals).voxel_down_sample(side)
    return surface_points(np.array(reduced.points), None if points.normals is None else np.array(reduced.normals))


def icp_transform(surface: SurfacePoints, truth: SurfacePoints, distance: float) -> Float[np.ndarray, "4 4"]:
    """Returns the rigid motion that brings the surface's points nearest to the truth's (point-to-point ICP).

    Points at more than the distance are not matched.
    """
    o3d = open3d()
    ours, theirs = (point_cloud(voxel_means(part, distance / 2).positions) for part in (surface, truth))
    registration = o3d.pipelines.registration.registration_icp(ours, theirs, distance)
    return np.array(registration.transformation)


def transform_surface(surface: Surface, transform: Float[np.ndarray, "4 4"]) -> Surface:
    """Returns a surface under a similarity transform."""
    if isinstance(surface, trimesh.Trimesh):
        surface = surface.copy()
        surface.apply_transform(transform)
        return surface
    turn, shift = transform[:3, :3].T, transform[:3, 3]
    return surface_points(surface.positions @ turn + shift, None if surface.normals is None else surface.normals @ turn)


def _dense(mesh: Surface, spacing: float) -> SurfacePoints:
    """Samples a mesh at least as densely as the spacing; given points are taken as they are."""
    if isinstance(mesh, SurfacePoints):
        return mesh
    count = int(_POINTS_PER_SPACING * mesh.area / spacing**2) + 1
    if count > _MOST_SAMPLES:
        raise MeshError(
            f"The mesh has an area of {mesh.area:.3g} square units, which at a spacing of {spacing:g} takes "
            f"{count:.2g} points: check that it is in the frame and units of the truth."
        )
    return sample_mesh(mesh, count)


def _read_mat(path: Path, names: tuple[str, ...]) -> Mapping[str, Any]:
    from scipy.io import loadmat

    if not path.is_file():
        raise ConfigError(f"There is no file {path}: give the .mat that comes with DTU's evaluation.")
    try:
        content = loadmat(path)
    except Exception as error:  # scipy raises whatever comes
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): give a .mat file of DTU.") from error
    missing = [name for name in names if name not in content]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: give DTU's ObsMask*.mat and Plane*.mat.")
    return content


NEEDED_VIEWS = 2
"""Cameras that must see a point: one alone cannot tell how far away it is."""
_RAY_END = 1e-3
"""Share of the distance by which a ray ends before its point, so that the point's own face does not hide it."""


def visible_points(
    points: Float[np.ndarray, "points 3"],
    truth: trimesh.Trimesh,
    capture: Path,
    on_progress: Callable[[int], None] = lambda views: None,
) -> Bool[np.ndarray, " points"]:
    """Returns which points on a mesh at least two training cameras see: in their images, and not hidden by the mesh.

    All are in the frame of the capture. Raises CaptureError as :func:`capture_views`.
    """
    views, frame = capture_views(capture)
    caster = RayCaster(truth.vertices, truth.faces)
    count = np.zeros(len(points), np.int8)
    for index in range(len(views.widths)):
        camera, left = Camera.of(views, index, frame), np.flatnonzero(count < NEEDED_VIEWS)
        pixel, depth = camera.project(points[left])
        left = left[(depth > 0) & ((pixel >= 0) & (pixel < (camera.width, camera.height))).all(axis=1)]
        hidden = caster.occluded(camera.center, points[left] - camera.center, far=1 - _RAY_END)
        count[left[~hidden]] += 1
        on_progress(index + 1)
    return count >= NEEDED_VIEWS


def capture_views(capture: Path) -> tuple[PinholeCameras, CaptureFrame]:
    """Returns the training cameras of a capture, scene frame, and the map from its own frame.

    Raises CaptureError where the capture cannot be read.
    """
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    outputs = CaptureDataParserConfig(data=capture).setup().get_dataparser_outputs("train")
    return PinholeCameras.of(outputs.cameras), CaptureFrame.from_outputs(outputs, capture)


_SLAB = 1 << 20


def thin_out(points: SurfacePoints, spacing: float) -> SurfacePoints:
    """Removes points until none is nearer than the spacing to another: in random order, each keeps its neighbours out.

    Works on slabs along the longest axis, so that memory holds the pairs of one slab only.
    """
    order = np.random.default_rng(0).permutation(len(points))
    axis = int(np.ptp(points.positions, axis=0).argmax()) if len(points) else 0
    slabs = max(1, len(points) // _SLAB)
    slab_of = np.argsort(np.argsort(points.positions[order, axis], kind="stable")) * slabs // max(1, len(points))
    kept: list[np.ndarray] = []
    for slab in range(slabs):
        members = order[slab_of == slab]
        places = points.positions[members]
        if kept:
            before = KDTree(points.positions[kept[-1]])
            members = members[before.query(places, distance_upper_bound=spacing)[0] > spacing]
            places = points.positions[members]
        pairs = KDTree(places).query_pairs(spacing, output_type="ndarray") if len(places) else np.zeros((0, 2), int)
        pairs = np.sort(pairs, axis=1)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        starts = np.searchsorted(pairs[:, 0], np.arange(len(members) + 1))
        kept.append(members[_keep(starts, pairs[:, 1].copy())])
    return points.take(np.sort(np.concatenate(kept)))


@no_type_check
@njit(cache=True)
def _keep(starts, ends):
    """Returns which places stay when each, in order, keeps out those it is paired with."""
    keep = np.ones(len(starts) - 1, np.bool_)
    for place in range(len(keep)):
        if keep[place]:
            for index in range(starts[place], starts[place + 1]):
                keep[ends[index]] = False
    return keep
