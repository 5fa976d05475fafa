"""Open3D, imported where it is used: it takes a second, and needs libraries that bare machines lack."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from f3rm_ext.errors import ConfigError, library_advice, reason_of
from f3rm_ext.utils.libusb import provide_libusb


def open3d() -> Any:
    """Returns the module.

    Raises:
        ConfigError: it is not installed, or a library of the system that it needs is not.
    """
    provide_libusb()
    try:
        import open3d as module
    except (ImportError, OSError) as error:
        advice = library_advice(error) or "`pip install open3d libusb-package`"
        raise ConfigError(
            f"Open3D, which meshes and the synthetic room need, cannot be imported ({reason_of(error)}): {advice}."
        ) from error
    module.utility.set_verbosity_level(module.utility.VerbosityLevel.Error)
    return module


class RayCaster:
    """Casts rays at triangles (Embree); lengths are in the unit of the vertices, single precision.

    Raises:
        ConfigError: see :func:`open3d`.
    """

    def __init__(self, vertices: Float[np.ndarray, "verts 3"], faces: Integer[np.ndarray, "faces 3"]) -> None:
        o3d = open3d()
        self._tensor = o3d.core.Tensor
        self._scene = o3d.t.geometry.RaycastingScene()
        self._scene.add_triangles(
            self._tensor(np.asarray(vertices, np.float32)), self._tensor(np.asarray(faces, np.uint32))
        )

    def cast(self, origins: Float[np.ndarray, "*#rays 3"], directions: Float[np.ndarray, "*#rays 3"]) -> dict[str, Any]:
        """Returns ``t_hit``, ``primitive_ids``, ``primitive_uvs`` and ``primitive_normals`` where rays first hit.

        t_hit is in units of the direction's length, infinite where a ray misses.
        """
        hit = self._scene.cast_rays(self._rays(origins, directions))
        return {key: value.numpy() for key, value in hit.items()}

    def occluded(
        self,
        origins: Float[np.ndarray, "*#rays 3"],
        directions: Float[np.ndarray, "*#rays 3"],
        near: float = 0.0,
        far: float = 1.0,
    ) -> Bool[np.ndarray, "*_"]:
        """Returns which rays hit a triangle between ``near`` and ``far``, in units of the direction's length."""
        return self._scene.test_occlusions(self._rays(origins, directions), tnear=near, tfar=far).numpy()

    def nearest(
        self, points: Float[np.ndarray, "n 3"]
    ) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
        """Returns the nearest places: triangles, barycentric weights of the second and third corner, and distances."""
        points = np.ascontiguousarray(points, np.float32)
        near = self._scene.compute_closest_points(self._tensor(points))
        away = np.linalg.norm(near["points"].numpy() - points, axis=1)
        return near["primitive_ids"].numpy().astype(np.int64), near["primitive_uvs"].numpy(), away

    def _rays(self, origins: np.ndarray, directions: np.ndarray) -> Any:
        rays = np.empty((*np.broadcast_shapes(origins.shape[:-1], directions.shape[:-1]), 6), np.float32)
        rays[..., :3], rays[..., 3:] = origins, directions
        return self._tensor(rays)
