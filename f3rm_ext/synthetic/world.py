"""The whole scene of a seed: things at their places as one labelled mesh, and its light."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from f3rm_ext.synthetic import objects, room
from f3rm_ext.synthetic.lighting import Lights, bake
from f3rm_ext.synthetic.materials import MaterialTable, pack
from f3rm_ext.synthetic.mesh import Mesh, join_meshes, placement
from f3rm_ext.synthetic.patterns import pattern_colors
from f3rm_ext.synthetic.render import LitScene
from f3rm_ext.utils.open3d_library import RayCaster

TABLE_HEIGHT = 0.74
LOOK_AT = (0.0, 0.0, TABLE_HEIGHT + 0.12)
"""Point that every camera looks at, metres."""


@dataclass(frozen=True)
class LabelledObject:
    """One labelled thing of the scene."""

    label: int
    """Id in the label images and in the mesh, ≥ 1."""
    name: str
    """Name, unique in the scene."""
    kind: str
    """``object`` (things on the table, the table itself, the rug), ``furniture`` or ``room``."""
    object_to_world: Float[np.ndarray, "4 4"]
    """Pose of its own frame (z up, standing on z = 0) in the world; identity for parts of the room."""


@dataclass(frozen=True)
class World:
    """Geometry, materials, names and lights of the scene, before lighting is computed."""

    mesh: Mesh
    """The whole scene in the world frame."""
    materials: MaterialTable
    things: list[LabelledObject]
    """Labelled things in the order of their labels 1, 2, 3 …"""
    vertex_rgb: Float[np.ndarray, "verts 3"]
    """Albedo (or emitted colour) at each vertex, linear RGB."""
    lights: Lights

    @property
    def vertex_material(self) -> np.ndarray:
        """Material of each vertex (verts,)."""
        return _vertex_values(self.mesh, self.mesh.material)

    @property
    def vertex_label(self) -> np.ndarray:
        """Label of each vertex (verts,)."""
        return _vertex_values(self.mesh, self.mesh.label)


def _vertex_values(mesh: Mesh, per_face: np.ndarray) -> np.ndarray:
    # No vertex is shared between two materials or objects: meshes are joined, never welded.
    out = np.zeros(len(mesh.vertices), per_face.dtype)
    out[mesh.faces] = per_face[:, None]
    return out


def build_world(seed: int, shiny: bool = True, light_rays: int = 32) -> World:
    """Builds the scene of a seed. The same seed always gives the same scene.

    Args:
        light_rays: The option of that name. Here it sets how many points represent the window and the lamp.
    """
    rng = np.random.default_rng([seed, 1])
    shop = objects.Workshop(rng)
    meshes: list[Mesh] = []
    things: list[LabelledObject] = []

    def add(name: str, kind: str, mesh: Mesh, pose: np.ndarray | None = None) -> None:
        pose = np.eye(4) if pose is None else pose
        things.append(LabelledObject(len(things) + 1, name, kind, pose))
        meshes.append(mesh.move(pose).tag(len(things)))

    add("table", "object", objects.table(shop, height=TABLE_HEIGHT), placement(0, 0, 0.012, rng.uniform(0, 360)))
    add("rug", "object", objects.rug(shop), placement(0, 0, 0, rng.uniform(0, 360)))
    top = TABLE_HEIGHT + 0.012
    lamp_pose = placement(rng.uniform(-0.01, 0.01), rng.uniform(-0.01, 0.01), top)
    add("lamp", "object", objects.lamp(shop), lamp_pose)
    phase = rng.uniform(0, 360)
    names = list(objects.TALL)
    for k, i in enumerate(rng.permutation(len(names))):
        angle = phase + 360 / len(names) * k + rng.uniform(-6, 6)
        add(
            names[i],
            "object",
            objects.TALL[names[i]](shop),
            _table_pose(angle, 0.262, top, angle + 90 + rng.uniform(-15, 15)),
        )
    phase = rng.uniform(0, 360)
    names = list(objects.SMALL)
    for k, i in enumerate(rng.permutation(len(names))):
        angle = phase + 360 / len(names) * k + rng.uniform(-4, 4)
        reach = 0.505 + rng.uniform(-0.012, 0.02)
        add(names[i], "object", objects.SMALL[names[i]](shop), _table_pose(angle, reach, top, rng.uniform(0, 360)))

    turn = np.deg2rad(rng.uniform(0, 360))
    stand = 1.02 * np.array([np.cos(turn), np.sin(turn)])
    add("stool", "furniture", room.stool(shop), placement(stand[0], stand[1], 0.012, rng.uniform(0, 360)))
    ball = -1.0 * np.array([np.cos(turn + 0.5), np.sin(turn + 0.5)])
    add("checker ball", "furniture", room.checker_ball(shop), placement(ball[0], ball[1], 0.012, 0, 25))
    add("bookshelf", "furniture", room.bookshelf(shop), placement(rng.uniform(-0.3, 0.3), -room.HALF, 0, 180))
    corner = placement(-1.87, 1.7, 0, rng.uniform(0, 360))
    add("floor plant", "furniture", objects.plant(shop, scale=2.3, leaves=30), corner)
    add("west painting", "furniture", room.painting(shop, 1.3, 0.9), placement(-room.HALF + 0.03, 0.1, 1.6, 90))
    add("east painting", "furniture", room.painting(shop, 0.8, 1.0), placement(room.HALF - 0.03, -0.2, 1.6, -90))
    add("curtains", "furniture", room.curtains(shop))
    add("window", "room", room.window(shop))
    add("walls", "room", room.walls(shop))
    add("floor", "room", room.floor(shop))
    add("ceiling", "room", room.ceiling(shop))

    mesh = join_meshes(meshes).compact()
    materials = pack(shop.materials, shiny)
    rgb = np.clip(pattern_colors(materials, _vertex_values(mesh, mesh.material), mesh.coords), 0, 1)
    return World(mesh, materials, things, rgb, room.lights(rng, lamp_pose, max(2, min(6, math.isqrt(light_rays)))))


def _table_pose(angle_deg: float, radius: float, z: float, turn_deg: float) -> np.ndarray:
    angle = np.deg2rad(angle_deg)
    return placement(radius * np.cos(angle), radius * np.sin(angle), z, turn_deg)


def light_world(world: World, gather_rays: int) -> LitScene:
    """Computes the scene's light and makes it ready to render.

    Args:
        gather_rays: Rays per vertex and bounce that gather the light between surfaces.
    """
    caster = RayCaster(world.mesh.vertices, world.mesh.faces)
    glows = world.materials.surface[world.vertex_material, 3] > 0
    light, sun_light = bake(caster, world.mesh, world.lights, world.vertex_rgb, glows, gather_rays)
    return LitScene(caster, world.mesh, world.materials, light, sun_light, world.lights.sun)
