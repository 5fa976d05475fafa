"""A mesh with features as a target of queries: see :class:`~f3rm_ext.query.queryable.Queryable`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import trimesh
from jaxtyping import Float, Int64
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.semantics.code_map import CodeMap, ScoredMesh, subdivide_to_texels
from f3rm_ext.mesh.texture.atlas import vertex_texels
from f3rm_ext.mesh.texture.rendering import SurfaceColors, get_texture, interpolate
from f3rm_ext.model_components.chunked_rendering import ChunkedRenderer
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import GroupedPoints, Scorer
from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads
from f3rm_ext.utils.open3d_library import RayCaster

CHUNK = 1 << 15
"""Vertices scored at once."""
REACH = 0.01
"""Distance up to which points belong to the mesh, as a share of the diagonal of its box."""
_GREY = 0.6


class QueryableMesh:
    """A mesh with features, :class:`~f3rm_ext.query.queryable.Queryable`. Everything runs on the CPU.

    A ray has the feature of the place where it first meets the mesh, a point that of the nearest place if it is near.
    Where there is a code map, a place has the feature of its texel, otherwise it is interpolated between vertices.

    Args:
        mesh: triangles, scene frame.
        heads: one code per vertex and feature.
    """

    training = False

    def __init__(self, mesh: trimesh.Trimesh, heads: LiftedHeads, maps: Mapping[str, CodeMap]) -> None:
        self.mesh = mesh
        self._heads, self._maps = heads, maps
        self._caster, self._faces = RayCaster(mesh.vertices, mesh.faces), np.asarray(mesh.faces)
        colored = get_texture(mesh) is not None or vertex_colors(mesh) is not None
        self._colors = SurfaceColors(mesh) if colored else None
        self._renderer = ChunkedRenderer()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def train(self, mode: bool = True) -> "QueryableMesh":
        """Does nothing: there is nothing to train."""
        return self

    def query_heads(self) -> dict[str, LiftedHead]:
        """Returns the features by name, the primary one first."""
        return self._heads.to_dict()

    @torch.no_grad()
    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Renders all outputs of one camera, (h, w, channels) each, and computes further ones chunk by chunk.

        Rays that meet no surface are white, and 0 in the other outputs and in the further ones.

        Args:
            extra: further outputs, see :class:`~f3rm_ext.query.queryable.Queryable`.
            obb_box: triangles whose middle lies outside are left out.
        """
        cast, heads = self._caster_within(obb_box), self.query_heads()

        def forward(rays: RayBundle) -> dict[str, Tensor | list]:
            faces, weights, away = cast(rays)
            hits = torch.from_numpy(np.isfinite(away))
            depth = torch.from_numpy(away).masked_fill(~hits, 0.0)[:, None]
            opaque = hits[:, None].float()
            rgb = torch.ones(len(hits), 3)
            rgb[hits] = self._shade(faces, weights, rays.directions[hits].numpy())
            outputs: dict[str, Any] = {"rgb": rgb, "accumulation": opaque, "depth": depth, "expected_depth": depth}

            @functools.cache
            def render_values(name: str) -> Tensor:
                values = torch.zeros(len(hits), heads[name].codes.shape[1])
                values[hits] = self._values(name, faces, weights)
                return values

            for name, compute in extra.items():
                value = compute(outputs, render_values)
                if value is not None:
                    outputs[name] = value * opaque
            return outputs

        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        return self._renderer.render(rays.to("cpu"), forward, self.device)

    def grouped_points(self, name: str) -> GroupedPoints | None:
        """Returns the vertices in groups by the feature of this name; None where they are not known."""
        head = self.query_heads().get(name)
        if head is None or head.groups is None:
            return None
        return GroupedPoints(torch.from_numpy(np.asarray(self.mesh.vertices, np.float32)), head.codes, head.groups)

    @torch.no_grad()
    def group_map(self, camera: Cameras, name: str, obb_box: OrientedBox | None = None) -> Int64[np.ndarray, "h w"]:
        """Returns the group of the vertex that is nearest to what each pixel shows; -1 for none."""
        groups, cast = self.query_heads()[name].groups, self._caster_within(obb_box)
        assert groups is not None

        def forward(rays: RayBundle) -> dict[str, Tensor | list]:
            faces, weights, away = cast(rays)
            corners = np.stack([1.0 - weights.sum(axis=1), *weights.T]).argmax(axis=0)
            shown = np.full((len(away), 1), OTHER)
            shown[np.isfinite(away), 0] = groups.numpy()[self._faces[faces, corners]]
            return {"group": torch.from_numpy(shown)}

        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        return self._renderer.render(rays.to("cpu"), forward, self.device)["group"][..., 0].numpy()

    @torch.no_grad()
    def render_points(self, points: Float[Tensor, "points 3"]) -> dict[str, Float[Tensor, "points feat"]]:
        """Returns the features at points of the scene frame: those of the nearest places on the mesh.

        Points farther away than :data:`REACH` have NaN, so that no query finds them.
        """
        faces, weights, away = self._caster.nearest(points.cpu().float().numpy())
        beyond = torch.from_numpy(away > REACH * self.mesh.scale)
        return {
            name: self._values(name, faces, weights).masked_fill_(beyond[:, None], torch.nan)
            for name in self.query_heads()
        }

    @torch.no_grad()
    def score_vertices(self, queries: Sequence[Query]) -> Float[np.ndarray, "verts queries"]:
        """Returns the scores of the vertices. Raises as :meth:`~f3rm_ext.query.queryable.Scorer.from_model`."""
        scorer, heads = Scorer.from_model(self, queries), self.query_heads()
        starts = range(0, len(self.mesh.vertices), CHUNK)
        parts = [scorer(lambda name, at=at: heads[name].codes[at : at + CHUNK].float()) for at in starts]
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def score(self, query: Query) -> ScoredMesh:
        """Returns the mesh with :meth:`score_vertices`; with a code map, as fine as that."""
        scores, scorer = self.score_vertices([query])[:, 0], Scorer.from_model(self, [query])
        code_map = self._maps.get(scorer.heads[0])
        if code_map is None:
            return self.mesh, scores
        codes = torch.from_numpy(code_map.dictionary).float()
        return subdivide_to_texels(self.mesh, scores, code_map, scorer(lambda _: codes)[:, 0].numpy())

    def vertex_colors(self) -> Float[np.ndarray, "verts 3"]:
        """Returns the colours of the vertices, 0 to 1; grey for a mesh without colours."""
        if self._colors is None:
            return np.full((len(self.mesh.vertices), 3), _GREY)
        corners = vertex_texels(self.mesh)
        return self._colors(corners.faces, corners.weights) / 255.0

    def _caster_within(self, obb_box: OrientedBox | None) -> Callable[[RayBundle], tuple[np.ndarray, ...]]:
        """Returns a function that finds where rays meet the mesh: triangles and barycentric weights of their second and
        third corner; and all distances, infinite for misses."""
        inside, caster = None, self._caster
        if obb_box is not None:
            middles = torch.from_numpy(np.asarray(self.mesh.triangles_center, np.float32))
            inside = np.flatnonzero(obb_box.within(middles).numpy())
            caster = RayCaster(self.mesh.vertices, self._faces[inside])

        def cast(rays: RayBundle) -> tuple[np.ndarray, ...]:
            hit = caster.cast(rays.origins.numpy(), rays.directions.numpy())
            hits = np.isfinite(hit["t_hit"])
            faces = hit["primitive_ids"][hits].astype(np.int64)
            return faces if inside is None else inside[faces], hit["primitive_uvs"][hits], hit["t_hit"]

        return cast

    def _values(self, name: str, faces: np.ndarray, weights: np.ndarray) -> Float[Tensor, "n feat"]:
        codes = self.query_heads()[name].codes.numpy()
        values = np.empty((len(faces), codes.shape[1]), np.float32)
        corners, missing = self._faces[faces], np.ones(len(values), bool)
        if name in self._maps:
            assert isinstance(self.mesh.visual, TextureVisuals)
            entries = self._maps[name].look_up(interpolate(np.asarray(self.mesh.visual.uv), corners, weights))
            missing = entries < 0
            values[~missing] = self._maps[name].dictionary[entries[~missing]]
        values[missing] = interpolate(codes, corners[missing], weights[missing])
        return torch.from_numpy(values)

    def _shade(self, faces: np.ndarray, weights: np.ndarray, directions: np.ndarray) -> Float[Tensor, "n 3"]:
        """Colours, 0 to 1; a mesh without colours is grey, lighter where it faces the camera."""
        if self._colors is not None:
            return torch.from_numpy(self._colors(faces, weights) / 255.0).float()
        normals = np.asarray(self.mesh.face_normals)[faces]
        facing = np.abs((normals * directions).sum(axis=1)) / np.linalg.norm(directions, axis=1)
        return torch.from_numpy(np.repeat(0.2 + 0.7 * facing[:, None], 3, axis=1)).float()
