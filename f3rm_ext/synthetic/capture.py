"""Renders the scene from every camera and writes a capture. Import this module late, because it imports numba."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from trimesh.exchange.ply import export_ply

from f3rm_ext.synthetic import capture_files as files
from f3rm_ext.synthetic.cameras import focal_length_px, held_out_views, orbit
from f3rm_ext.synthetic.config import SynthConfig
from f3rm_ext.synthetic.render import render
from f3rm_ext.synthetic.world import LOOK_AT, World, build_world, light_world
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.pictures import to_bytes, to_srgb
from f3rm_ext.utils.ranges import check_ranges

CONVENTIONS = {
    "units": "metres",
    "world": "right-handed, z up, floor at z = 0, origin below the middle of the table",
    "camera": "transform_matrix is camera to world, OpenGL (x right, y up, looking along -z)",
    "pixels": "pixel (row 0, column 0) covers [0, 1) x [0, 1); its centre is (0.5, 0.5)",
    "depth": "uint16 PNG, millimetres along the optical axis (z-depth) at pixel centres, 0 = nothing",
    "normals": "uint8 RGB PNG, world frame, component = value / 127.5 - 1, towards the camera, at pixel centres",
    "labels": "uint8 PNG, object id at pixel centres, 0 = nothing, names in classes.txt",
    "images": "8-bit sRGB, filmic tone curve, samples x samples rays per pixel",
}


def write_capture(out: Path, config: SynthConfig, progress: bool = True) -> Path:
    """Writes a synthetic capture, see :func:`f3rm_ext.synthetic.synthesize`."""
    from rich.console import Console

    check_ranges(config)
    console = Console(stderr=True)
    with (
        files.replace_capture(out, config.overwrite) as folder,
        image_progress(on=console, disable=not (progress and console.is_terminal)) as bar,
    ):
        task = bar.add_task("Lighting the room", total=config.num_images)
        world = build_world(config.seed, config.shiny, config.light_rays)
        scene = light_world(world, config.light_rays)
        bar.reset(task, description="Taking pictures")
        for name in files.IMAGE_FOLDERS:
            (folder / name).mkdir()
        poses = orbit(config.num_images, np.array(LOOK_AT), config.seed)
        focal_px = focal_length_px(config.fov, config.width)
        for k, pose in enumerate(poses):
            size = config.width, config.height
            view = render(scene, pose, *size, focal_px, samples=config.samples, bounces=config.bounces)
            name = _frame_name(k)
            files.write_png(folder / "images" / name, view.rgb)
            files.write_png(folder / "depth" / name, files.encode_depth(view.depth))
            files.write_png(folder / "normals" / name, files.encode_normals(view.normals))
            files.write_png(folder / "labels" / name, view.labels)
            bar.advance(task)
        _write_mesh(folder, world)
        names = ["background", *[thing.name for thing in world.things]]
        (folder / "classes.txt").write_text("".join(f"{i} {name}\n" for i, name in enumerate(names)), encoding="utf-8")
        files.sync(folder / "classes.txt")
        files.write_json(folder / "classes.json", {str(i): name for i, name in enumerate(names)})
        files.write_json(folder / "scene.json", _scene(config, world))
        files.write_json(folder / "transforms.json", _transforms(config, poses, focal_px, names))
    return out


def _frame_name(k: int) -> str:
    return f"frame_{k + 1:05d}.png"


def _write_mesh(folder: Path, world: World) -> None:
    """Writes a binary PLY with normal, colour and ``label`` at each vertex, and the same as arrays."""
    mesh = world.mesh
    vertices, faces = mesh.vertices.astype(np.float32), mesh.faces.astype(np.int32)
    normals, labels = mesh.normals.astype(np.float32), world.vertex_label.astype(np.uint8)
    colors = to_bytes(to_srgb(world.vertex_rgb))
    ply = trimesh.Trimesh(vertices, faces, vertex_normals=normals, vertex_colors=colors, process=False)
    ply.vertex_attributes["label"] = labels
    (folder / "gt_mesh.ply").write_bytes(export_ply(ply, vertex_normal=True))
    files.sync(folder / "gt_mesh.ply")
    arrays = {
        "vertices": vertices,
        "faces": faces,
        "vertex_label": labels,
        "vertex_normal": normals,
        "vertex_color": colors,
        "face_label": mesh.label.astype(np.uint8),
    }
    np.savez_compressed(folder / "gt_mesh.npz", **arrays)
    files.sync(folder / "gt_mesh.npz")


def _scene(config: SynthConfig, world: World) -> dict[str, Any]:
    options = dataclasses.asdict(config)
    del options["overwrite"]
    vertex_label = world.vertex_label
    things = []
    for thing in world.things:
        points = world.mesh.vertices[vertex_label == thing.label]
        things.append(
            {
                "label": thing.label,
                "name": thing.name,
                "kind": thing.kind,
                "object_to_world": thing.object_to_world.tolist(),
                "bounds": [points.min(axis=0).tolist(), points.max(axis=0).tolist()],
            }
        )
    return {
        "generator": files.GENERATOR,
        "format": 1,
        "seed": config.seed,
        "options": options,
        "conventions": CONVENTIONS,
        "look_at": list(LOOK_AT),
        "sun_direction": world.lights.sun[0].tolist(),
        "objects": things,
    }


def _transforms(config: SynthConfig, poses: np.ndarray, focal_px: float, names: list[str]) -> dict[str, Any]:
    test = set(held_out_views(config.num_images, config.holdout_every))
    keys = ("file_path", "depth_file_path", "normal_file_path", "label_file_path")
    frames = []
    for k, pose in enumerate(poses):
        paths = {key: f"{folder}/{_frame_name(k)}" for key, folder in zip(keys, files.IMAGE_FOLDERS, strict=True)}
        frames.append({**paths, "split": "test" if k in test else "train", "transform_matrix": pose.tolist()})
    held = [frame["file_path"] for frame in frames if frame["split"] == "test"]
    return {
        "camera_model": "OPENCV",
        "fl_x": focal_px,
        "fl_y": focal_px,
        "cx": config.width / 2,
        "cy": config.height / 2,
        "w": config.width,
        "h": config.height,
        "k1": 0.0,
        "k2": 0.0,
        "p1": 0.0,
        "p2": 0.0,
        "depth_unit_scale_factor": files.DEPTH_UNIT_M,
        "ply_file_path": "gt_mesh.ply",
        "classes": names,
        "train_filenames": [frame["file_path"] for frame in frames if frame["split"] == "train"],
        "val_filenames": held,
        "test_filenames": held,
        "frames": frames,
    }
