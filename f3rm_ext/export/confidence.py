"""Measuring the confidence of a run of splats, and advising the next photos: files, and a page for people."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.images import tell_apart
from f3rm_ext.data.confidence import confidence
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import checkpoint
from f3rm_ext.export.derived import REPORT, Report, Strip, write_report
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.page import Picture, rounded
from f3rm_ext.html.tables import Table
from f3rm_ext.splat.next_best_view import NextView, choose, propose, survey, up_of
from f3rm_ext.splat.rendering import composite, render
from f3rm_ext.utils.colormaps import depth_colors_bytes
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.output_file import write_file
from f3rm_ext.utils.output_folder import OutputFolder, made_by
from f3rm_ext.utils.pictures import pick_evenly, to_bytes

COMMAND = "splats confidence"
NEXT_PHOTOS, CAMERA_PATH = "next_photos.json", "camera_path.json"
SURE = 0.5
"""Two views at right angles give this confidence."""
_PICTURES = 4
_SECONDS = 2.0
"""Time from one advised camera to the next in the camera path."""
_SAME_PLACE = 0.02
"""Share of the reach of the cameras by which one stands elsewhere."""


@dataclass(frozen=True)
class Advice:
    """A next photo."""

    view: NextView
    words: str
    """Where to stand, seen from the nearest photo, and how to turn: one sentence."""
    near: int
    """Index of the training photo that was taken nearest to it."""


@dataclass(frozen=True)
class Measurement:
    """The confidence of a run, and what would raise it."""

    confidence: Float[Tensor, " gaussians"]
    """0 to 1, on the CPU."""
    mean: float
    """Mean confidence of the Gaussians, weighed by how much of the photos each makes up, 0 to 1."""
    unsure: float
    """Share of what they show that has less than ``SURE``."""
    advice: Sequence[Advice]
    """The best photo first."""

    def __str__(self) -> str:
        return (
            f"Confidence of what the photos show: {self.mean:.2f} in the mean; {self.unsure:.0%} of it has less than "
            f"{SURE:g}, as two views at right angles give. {len(self.advice)} next photos are advised."
        )


def measure_confidence(run: SplatRun, photos: int) -> Measurement:
    """Measures the confidence of the Gaussians of a run, and chooses at most so many next photos."""
    dataset = run.manager.train_dataset
    scene, views = run.scene(run.splats()), PinholeCameras.of(dataset.cameras).to("cpu")
    with image_progress("views") as progress:
        task = progress.add_task("Confidence", total=len(dataset))
        surveyed = survey(scene, views, lambda: progress.advance(task))
        chosen: list[NextView] = []
        if photos:
            task = progress.add_task("Next photos", total=None)
            candidates = propose(scene, views, surveyed)
            progress.update(task, total=len(candidates.widths) + len(surveyed.usual.widths))
            chosen = choose(scene, views, surveyed, candidates, photos, lambda: progress.advance(task))
    values, weights = confidence(surveyed.evidence.information), surveyed.evidence.contribution
    total = float(weights.sum()) or 1.0
    names, unit = tell_apart(dataset.image_filenames), run.frame.scale
    advice = [Advice(view, *_describe(view.camera, views, names, unit)) for view in chosen]
    unsure = float(weights[values < SURE].sum()) / total
    return Measurement(values, float((weights * values).sum()) / total, unsure, advice)


def _describe(camera: PinholeCameras, views: PinholeCameras, names: Sequence[str], unit: float) -> tuple[str, int]:
    """Says where to stand and how to turn, as seen from the nearest photo. Returns its index too.

    ``unit`` is the number of scene units in a unit of the capture.
    """
    up, apart = up_of(views), (views.positions - camera.positions).norm(dim=1)
    near = int(apart.argmin())
    ahead, ours = (functional.normalize(d - (d @ up) * up, dim=0) for d in (views.forward[near], camera.forward[0]))
    right, step = torch.linalg.cross(ahead, up), camera.positions[0] - views.positions[near]
    moves = [
        f"{rounded(abs(length) / unit)} {more if length > 0 else less}"
        for length, more, less in (
            (float(step @ right), "to the right", "to the left"),
            (float(step @ ahead), "forward", "back"),
            (float(step @ up), "higher", "lower"),
        )
        if abs(length) > _SAME_PLACE * views.extent()
    ]
    where = f"near {names[near]}, {', '.join(moves)}" if moves else f"where {names[near]} was taken"
    turn = math.degrees(math.atan2(float(ours @ right), float(ours @ ahead)))
    pitch = math.degrees(math.asin(max(-1.0, min(1.0, float(camera.forward[0] @ up)))))
    side = f"turn {abs(turn):.0f}° to the {'right' if turn > 0 else 'left'}" if abs(turn) >= 5 else "keep its direction"
    tilt = f"look {abs(pitch):.0f}° {'up' if pitch > 0 else 'down'}" if abs(pitch) >= 5 else "look ahead"
    return f"Stand {where}; {side}, and {tilt}.", near


def _scene_pose(camera: PinholeCameras) -> Float[np.ndarray, "4 4"]:
    """Returns the pose of one camera: camera to scene, OpenGL axes."""
    pose = np.eye(4)
    pose[:3, :3] = camera.viewmats[0, :3, :3].double().numpy().T * [1.0, -1.0, -1.0]
    pose[:3, 3] = camera.positions[0].double().numpy()
    return pose


def save_confidence(path: Path, values: Float[Tensor, " gaussians"]) -> None:
    """Rewrites a checkpoint with the confidence of its Gaussians; everything else in it stays.

    Raises:
        CheckpointError: the checkpoint cannot be read or written; it is then unchanged.
    """
    content = checkpoint.load(path)
    checkpoint.write({**content, "pipeline": {**content["pipeline"], "_model.confidence": values}}, path)


def write_measurement(run: SplatRun, out: Path, measured: Measurement) -> None:
    """Writes the advised poses, for programs and for the viewer, and the page.

    Raises:
        ConfigError: files of others are in the way, or the folder cannot be written to.
    """
    folder = OutputFolder(out, {**made_by(COMMAND), **run.describe()})
    frame, texts = run.frame, {}
    if measured.advice:
        texts[NEXT_PHOTOS] = json.dumps({**folder.provenance, "frames": [_as_frame(a, frame) for a in measured.advice]})
        texts[CAMERA_PATH] = json.dumps(_camera_path([a.view.camera for a in measured.advice]))
    folder.plan([REPORT, *texts])
    for name, text in texts.items():
        write_file(out / name, text.encode())
    report = Report(
        title="How sure the splats are, and where to stand next",
        lead=f"{measured} In the pictures of confidence blue is 0 and red is 1. Lengths are in units of the capture.",
        keys=[
            (f"{measured.mean:.2f}", "mean confidence of what the photos show"),
            (f"{measured.unsure:.0%}", f"of what they show has less than {SURE:g}"),
        ],
        heading="Next photos",
        table=Table(
            ["photo", "gain", "how to take it"],
            [(str(i), f"{a.view.gain:.3f}", a.words) for i, a in enumerate(measured.advice, start=1)],
            "lrn",
        ),
    )
    write_report(run, out, COMMAND, report, _strips(run, measured))
    folder.summary(
        {
            "complete": True,
            "gaussians": len(measured.confidence),
            "mean_confidence": measured.mean,
            "unsure_share": measured.unsure,
            "next_photos": [{"gain": a.view.gain, "words": a.words} for a in measured.advice],
        }
    )


def _as_frame(advice: Advice, frame: CaptureFrame) -> dict[str, object]:
    """Returns an advised photo as a frame of transforms.json."""
    camera = advice.view.camera
    pose = _scene_pose(camera)
    pose[:3, :3] = frame.directions_to_capture(pose[:3, :3].T).T
    pose[:3, 3] = frame.to_capture(pose[:3, 3])
    (fx, _, cx), (_, fy, cy), _ = camera.Ks[0].tolist()
    return {
        **{"fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy, "w": int(camera.widths[0]), "h": int(camera.heights[0])},
        "transform_matrix": pose.tolist(),
        "gain": advice.view.gain,
        "words": advice.words,
    }


def _camera_path(cameras: Sequence[PinholeCameras]) -> dict[str, object]:
    """Returns cameras as a camera path of nerfstudio's viewer, which stops at each of them."""
    stops = []
    for camera in cameras:
        fov = 2 * math.degrees(math.atan(float(camera.heights[0] / (2 * camera.Ks[0, 1, 1]))))
        aspect = float(camera.widths[0] / camera.heights[0])
        stops.append((_scene_pose(camera).flatten().tolist(), {"fov": fov, "aspect": aspect}))
    return {
        "camera_type": "perspective",
        "render_width": int(cameras[0].widths[0]),
        "render_height": int(cameras[0].heights[0]),
        "fps": 1 / _SECONDS,
        "seconds": _SECONDS * len(cameras),
        "is_cycle": False,
        "smoothness_value": 0.0,
        "default_fov": stops[0][1]["fov"],
        "default_transition_sec": _SECONDS,
        "keyframes": [{"matrix": pose, **lens} for pose, lens in stops],
        "camera_path": [{"camera_to_world": pose, **lens} for pose, lens in stops],
    }


@torch.no_grad()
def _strips(run: SplatRun, measured: Measurement) -> list[Strip]:
    """Pictures at the advised places, then at some training photos: a photo, and splats and confidence from there."""
    dataset, device = run.manager.train_dataset, run.model.device
    names, views = tell_apart(dataset.image_filenames), PinholeCameras.of(dataset.cameras)
    scene, values = run.scene(run.splats()), measured.confidence.to(device)[:, None]

    def strip(view: PinholeCameras, photo: int, photo_label: str, label: str) -> Strip:
        one = PinholeCameras(view.viewmats.to(device), view.Ks.to(device), view.widths, view.heights)
        sure = composite(scene, one, values)[..., 0].cpu().numpy()
        taken = run.photo("train", photo, rendered=True)
        drawn = render(scene, one).rasterization.colors.cpu().numpy()
        return [
            (photo_label, Picture.from_array(taken)),
            (label, Picture.from_array(to_bytes(drawn))),
            ("confidence", Picture.from_array(depth_colors_bytes(sure, 0.0, 1.0))),
        ]

    return [
        strip(advice.view.camera, advice.near, f"near it: {names[advice.near]}", f"next photo {number}: {advice.words}")
        for number, advice in enumerate(measured.advice, start=1)
    ] + [
        strip(views.take(slice(index, index + 1)), index, names[index], "splats")
        for index in pick_evenly(len(dataset), _PICTURES)
    ]
