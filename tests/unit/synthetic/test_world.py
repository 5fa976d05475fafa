"""What is in the room, and that the seed alone decides it."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

from f3rm_ext.synthetic import objects
from f3rm_ext.synthetic.cameras import HEIGHTS, RADII
from f3rm_ext.synthetic.render import LitScene, render
from f3rm_ext.synthetic.room import HALF, HEIGHT
from f3rm_ext.synthetic.world import World, build_world


def test_everything_is_in_the_room_and_out_of_the_cameras_way(world: World) -> None:
    x, y, z = world.mesh.vertices.T
    assert max(np.abs(x).max(), np.abs(y).max()) <= HALF + 0.06  # sill and pane reach into the wall
    assert z.min() > -0.01 and z.max() <= HEIGHT + 1e-9
    walls = [thing.label for thing in world.things if thing.name in ("walls", "floor", "ceiling")]
    inner = world.mesh.vertices[~np.isin(world.vertex_label, walls)]
    axis = np.linalg.norm(inner[:, :2], axis=1)
    ring = (axis > min(RADII) - 0.25) & (axis < max(RADII) + 0.25)
    assert not (ring & (inner[:, 2] > min(HEIGHTS) - 0.25)).any()


def test_objects_on_the_table_do_not_run_into_each_other(world: World) -> None:
    """Above the table top, no vertex of one object lies in the footprint (a convex hull) of another."""
    from matplotlib.path import Path as Outline
    from scipy.spatial import ConvexHull

    small = [thing for thing in world.things if thing.name in objects.SMALL]
    foot = {t.name: world.mesh.vertices[world.vertex_label == t.label][:, :2] for t in small}
    hull = {name: Outline(points[ConvexHull(points).vertices]) for name, points in foot.items()}
    for one, points in foot.items():
        assert not any(hull[other].contains_points(points).any() for other in foot if other != one), one


def test_other_seed_is_another_scene(world: World) -> None:
    other = build_world(1, shiny=False, light_rays=1)

    def poses(of: World) -> dict[str, np.ndarray]:
        return {thing.name: thing.object_to_world for thing in of.things if thing.name in objects.SMALL}

    assert all(np.abs(poses(other)[name] - pose).max() > 1e-3 for name, pose in poses(world).items())
    assert not np.array_equal(other.lights.sun[0], world.lights.sun[0])
    assert [thing.name for thing in other.things][:3] == ["table", "rug", "lamp"]
    # Without `shiny` nothing reflects, and lamp, flame and sky still glow.
    assert (other.materials.surface[:, :3] == 0).all() and (world.materials.surface[:, 0] > 0).any()
    assert (other.materials.surface[:, 3] > 0).sum() == (world.materials.surface[:, 3] > 0).sum() > 0


def test_light_falls_where_it_should(world: World, lit: LitScene) -> None:
    assert np.isfinite(lit.light).all() and (lit.light >= 0).all() and (lit.sun_light >= 0).all()
    labels = {thing.name: thing.label for thing in world.things}
    z, up = world.mesh.vertices[:, 2], world.mesh.normals[:, 2]
    table = world.vertex_label == labels["table"]
    top, below = table & (up > 0.99) & (z > 0.7), table & (up < -0.99) & (z > 0.65)
    assert np.median(lit.light[top]) > 2 * np.median(lit.light[below])
    ceiling, floor = (np.median(lit.light[world.vertex_label == labels[name]]) for name in ("ceiling", "floor"))
    assert ceiling > floor, "nothing stands before the ceiling, which sees what is lit from above"
    # The sun stands low behind the window: none of it reaches the wall the window is in, nor any surface facing away.
    away = world.mesh.normals @ world.lights.sun[0] <= 0
    assert (lit.sun_light[away] == 0).all() and (lit.sun_light[~away] > 0).any()


def test_what_is_seen_from_behind_has_normals_towards_the_camera(lit: LitScene) -> None:
    above = np.eye(4)
    above[2, 3] = HEIGHT + 1
    view = render(lit, above, 24, 16, 20.0)
    np.testing.assert_allclose(view.normals, np.broadcast_to([0.0, 0.0, 1.0], (16, 24, 3)), atol=1e-6)


def summarize_room(world: World, lit: LitScene) -> dict[str, list[float]]:
    """Mean and spread of places, normals, texture, colour and light of each thing's vertices."""
    mesh, surface = world.mesh, world.materials.surface[world.vertex_material]
    columns = [mesh.vertices, mesh.normals, mesh.coords, world.vertex_rgb, lit.light, lit.sun_light, surface]
    values = np.concatenate(columns, axis=1)
    things = {thing.name: values[world.vertex_label == thing.label] for thing in world.things}
    return {name: np.round([*rows.mean(axis=0), *rows.std(axis=0)], 6).tolist() for name, rows in things.items()}


def test_the_room_is_as_it_was(world: World, lit: LitScene, capture: SimpleNamespace) -> None:
    """Geometry, materials, light and pictures of seed 0 are those that are stored.

    After an intended change write ``summarize_room`` to room.json, and the pictures side by side to room.png.
    """
    stored = json.loads(Path(__file__).with_name("room.json").read_text())
    room = summarize_room(world, lit)
    assert room.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_allclose(room[name], values, rtol=1e-3, atol=2e-5, err_msg=name)
    pictures = np.asarray(Image.open(Path(__file__).with_name("room.png")))
    shown = capture.rgb.reshape(5, 2, 32, 48, 3).swapaxes(1, 2).reshape(pictures.shape)
    difference = np.abs(shown.astype(int) - pictures).max(axis=-1)
    assert (difference > 2).mean() < 2e-3, "rounding moves the edges of some pixels at most"
