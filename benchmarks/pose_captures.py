"""(A helper) Photos with true poses for pose_verdicts.py: good ones, and ones from which poses come out wrong.

A capture here is a list of pictures, each with its true pose and the scene it shows. Photos of different scenes have no
true pose to each other. Captures of others are cut down; rooms are boxes whose walls have pictures, cast ray by ray, so
that walls can be plain, or all alike, or a mirror.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.synthetic.cameras import look_at

WIDTH, HEIGHT, FOCAL_PX = 400, 300, 300.0
_SIZE = np.array([2.0, 2.0, 1.3])
"""Half of the room's extent, metres."""
_TEXTURE_PX = 768


@dataclass(frozen=True)
class TruePhoto:
    """A photo and what is known about it."""

    picture: Image.Image
    pose: Float[np.ndarray, "4 4"]
    """Camera to world, OpenGL axes."""
    scene: str = "a"


Photos = list[TruePhoto]
Wall = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Linear colours from 0 to 1, from coordinates along a wall and its height, 0 to 1."""


# --- rooms -----------------------------------------------------------------------------------------------------------


def picture_of(seed: int, strength: float = 1.0) -> np.ndarray:
    """Returns a square picture of blots of many sizes, and of rectangles; weaker ones are nearly grey."""
    rng = np.random.default_rng(seed)
    side = _TEXTURE_PX
    levels = np.zeros((side, side, 3))
    for cells in (6, 14, 35, 80):
        small = [Image.fromarray(rng.normal(size=(cells, cells)).astype(np.float32)) for _ in range(3)]
        blots = np.stack([np.asarray(one.resize((side, side), Image.Resampling.BICUBIC)) for one in small], axis=-1)
        levels += blots / blots.std() / 4
    for _ in range(40):
        x, y = rng.integers(0, side, 2)
        w, h = rng.integers(side // 60, side // 8, 2)
        levels[y : y + h, x : x + w] += rng.normal(size=3) / 2
    return np.clip(0.5 + 0.2 * strength * levels, 0, 1)


def papered(seed: int, strength: float = 1.0, repeats: int = 1) -> Wall:
    """Returns a wall with one picture all over it, or with the picture many times."""
    picture = picture_of(seed, strength)

    def color(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        at = [(v * repeats % 1) * (_TEXTURE_PX - 1), (u * repeats % 1) * (_TEXTURE_PX - 1)]
        return np.stack([map_coordinates(picture[..., c], at, order=1) for c in range(3)], axis=-1)

    return color


def plain(seed: int, sockets: int = 2) -> Wall:
    """Returns a painted wall: one colour, a little darker towards the corners, with some white sockets."""
    rng = np.random.default_rng(seed)
    base, places = rng.uniform(0.65, 0.85, 3), rng.uniform(0.1, 0.9, (sockets, 2))

    def color(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        shade = 1 - 0.25 * ((u - 0.5) ** 2 + (v - 0.5) ** 2)
        levels = shade[..., None] * base
        for x, y in places:
            inside = (np.abs(u - x) < 0.015) & (np.abs(v - y) < 0.02)
            levels = np.where(inside[..., None], 0.95, levels)
        return levels

    return color


def postered(wall: Wall, seed: int, place: float = 0.5, width: float = 0.35) -> Wall:
    """Returns a wall with a poster on it."""
    poster = papered(seed)

    def color(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        x, y = (u - place) / width + 0.5, (v - 0.5) / (1.4 * width) + 0.5
        inside = (x > 0) & (x < 1) & (y > 0) & (y < 1)
        return np.where(inside[..., None], poster(x, y), wall(u, v))

    return color


def take(
    walls: Sequence[Wall | None],
    pose: Float[np.ndarray, "4 4"],
    seed: int,
    noise: float = 2.0,
    size: np.ndarray = _SIZE,
) -> Image.Image:
    """Returns a photo of a room.

    Args:
        walls: at +x, -x, +y, -y, the floor and the ceiling; None is a mirror.
        pose: camera to world, OpenGL axes.
        seed: of the noise.
        noise: of the sensor, in levels of 255.
        size: half of the room's extent.
    """
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5 - WIDTH / 2, np.arange(HEIGHT) + 0.5 - HEIGHT / 2)
    rays = np.stack([x, -y, np.full_like(x, -FOCAL_PX)], -1).reshape(-1, 3) @ pose[:3, :3].T
    origin = np.broadcast_to(pose[:3, 3], rays.shape)
    levels = np.zeros_like(rays)
    todo = np.arange(len(rays))
    dimmed = 1.0
    for _ in range(2):
        o, d = origin[todo], rays[todo]
        with np.errstate(divide="ignore", invalid="ignore"):
            ways = np.where(d == 0, np.inf, (np.sign(d) * size - o) / d)
        axis = ways.argmin(axis=1)
        rows = np.arange(len(o))
        hit = o + ways[rows, axis][:, None] * d
        unit = (hit / size + 1) / 2
        which = 2 * axis + (d[rows, axis] < 0)
        mirrored = np.zeros(len(o), bool)
        for number, wall in enumerate(walls):
            here = which == number
            if not here.any():
                continue
            if wall is None:
                mirrored |= here
                continue
            along = [k for k in range(3) if k != number // 2]
            u, v = unit[here][:, along].T
            u = 1 - u if number in (1, 2) else u  # seen from inside, pictures run from left to right on all walls
            levels[todo[here]] = dimmed * wall(u, v)
        flip = np.ones_like(d)
        flip[rows, axis] = -1
        origin, rays = origin.copy(), rays.copy()
        origin[todo], rays[todo] = hit - 1e-6 * d, d * flip
        todo, dimmed = todo[mirrored], 0.85
    picture = levels.reshape(HEIGHT, WIDTH, 3) ** (1 / 1.4) * 255
    picture += np.random.default_rng(seed).normal(size=picture.shape) * noise
    return Image.fromarray(np.clip(np.rint(picture), 0, 255).astype(np.uint8))


def around(number: int, radius: float, seed: int, turns: float = 1.0) -> list[np.ndarray]:
    """Returns cameras on a circle that look through its middle at the walls, each a little beside the one before."""
    rng = np.random.default_rng([seed, 7])
    poses = []
    for k in range(number):
        angle = 2 * np.pi * turns * k / number
        way = np.array([np.cos(angle), np.sin(angle), 0.0])
        eye = -radius * way + radius * rng.normal(size=3) * [0.15, 0.15, 0.3]
        poses.append(look_at(eye, eye + way + [0, 0, rng.normal() * 0.06]))
    return poses


def across(number: int, radius: float, seed: int) -> list[np.ndarray]:
    """Returns cameras on a circle that look at the other side."""
    rng = np.random.default_rng([seed, 8])
    poses = []
    for k in range(number):
        angle = 2 * np.pi * k / number
        eye = radius * np.array([np.cos(angle), np.sin(angle), 0.0]) + rng.normal(size=3) * [0.1, 0.1, 0.2]
        poses.append(look_at(eye, rng.normal(size=3) * 0.1))
    return poses


def along(number: int, length: float, seed: int) -> list[np.ndarray]:
    """Returns cameras that walk along a corridor and look at one wall, a little ahead."""
    rng = np.random.default_rng([seed, 9])
    places = np.linspace(-length, length, number)
    return [look_at(eye := np.array([x, -0.5, rng.normal() * 0.1]), eye + [0.4, 1.0, 0.0]) for x in places]


def room(walls: Sequence[Wall | None], poses: Sequence[np.ndarray], seed: int = 0, size: np.ndarray = _SIZE) -> Photos:
    """Returns photos of a room."""
    return [TruePhoto(take(walls, pose, 100 * seed + k, size=size), pose) for k, pose in enumerate(poses)]


def six(make: Callable[[int], Wall], seed: int) -> list[Wall]:
    """Returns six different walls."""
    return [make(10 * seed + k) for k in range(6)]


# --- captures of others ----------------------------------------------------------------------------------------------


def some_of(capture: Path, number: int, first: int = 0, last: int | None = None, size: int = 0) -> Photos:
    """Returns photos of a capture with poses, at even distances.

    Args:
        capture: folder with a transforms.json, or the folder of Blender's chair.
        number: of photos.
        first: frame to begin with.
        last: frame to end before.
        size: longest side, px; 0 keeps it.
    """
    path = capture / "transforms_train.json"
    meta, folder = (json.loads(path.read_text()), capture) if path.exists() else read_transforms(capture)
    frames = meta["frames"][first:last]
    photos = []
    for k in np.linspace(0, len(frames) - 1, number).round().astype(int):
        name = Path(frames[k]["file_path"])
        with Image.open(folder / (name if name.suffix else name.with_suffix(".png"))) as image:
            picture = image.copy()
        if size:
            picture.thumbnail((size, size), Image.Resampling.LANCZOS)
        photos.append(TruePhoto(picture, np.array(frames[k]["transform_matrix"])))
    return photos


def changed(photos: Photos, change: Callable[[int, Image.Image], Image.Image], every: int = 1) -> Photos:
    """Returns photos of which every n-th is another picture."""
    return [
        TruePhoto(change(k, photo.picture.convert("RGB")), photo.pose, photo.scene) if k % every == 0 else photo
        for k, photo in enumerate(photos)
    ]


def noisy(blur_px: float, levels: float) -> Callable[[int, Image.Image], Image.Image]:
    """Returns a change that blurs and adds noise."""

    def change(k: int, picture: Image.Image) -> Image.Image:
        values = gaussian_filter(np.asarray(picture, np.float64), (blur_px, blur_px, 0))
        values += np.random.default_rng(k).normal(size=values.shape) * levels
        return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))

    return change


def on_top(part: float) -> Callable[[int, Image.Image], Image.Image]:
    """Returns a change that puts the same picture over a part of each photo, like the dashboard of a car."""
    cover = Image.fromarray((picture_of(77) * 255).astype(np.uint8))

    def change(_: int, picture: Image.Image) -> Image.Image:
        rows = int(part * picture.height)
        picture = picture.copy()
        picture.paste(cover.resize((picture.width, picture.width)).crop((0, 0, picture.width, rows)),
                      (0, picture.height - rows))  # fmt: skip
        return picture

    return change


def before_wall(photos: Photos, seed: int) -> Photos:
    """Returns transparent photos before one background, as those of a turntable have it."""
    wall = Image.fromarray((picture_of(seed) * 255).astype(np.uint8)).convert("RGBA")
    return [
        TruePhoto(Image.alpha_composite(wall.resize(p.picture.size), p.picture).convert("RGB"), p.pose) for p in photos
    ]


def cut(least: float) -> Callable[[int, Image.Image], Image.Image]:
    """Returns a change that keeps any part of a photo, enlarged, as if somebody had cropped it."""

    def change(k: int, picture: Image.Image) -> Image.Image:
        rng = np.random.default_rng(k)
        share = rng.uniform(least, 1)
        w, h = int(share * picture.width), int(share * picture.height)
        x, y = int(rng.uniform(0, picture.width - w)), int(rng.uniform(0, picture.height - h))
        return picture.crop((x, y, x + w, y + h)).resize(picture.size, Image.Resampling.LANCZOS)

    return change


def of_scene(photos: Photos, scene: str) -> Photos:
    """Returns photos of another scene."""
    return [TruePhoto(photo.picture, photo.pose, scene) for photo in photos]


# --- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeCapture:
    """How a capture is made, and what its half is: thresholds are chosen on one half and judged on the other."""

    half: str
    what: str
    make: Callable[[Path], Photos]
    """From the folder of captures of others."""
    mappers: tuple[str, ...] = ("incremental",)


_TALL = np.array([6.0, 2.0, 1.3])


def _corridor(doors: int, seed: int) -> list[Wall]:
    walls = six(lambda s: papered(s, 0.15), seed)
    walls[2] = walls[3] = papered(seed + 60, 1.0, doors)
    return walls


def _synth(number: int, seed: int) -> Callable[[Path], Photos]:
    def make(_: Path) -> Photos:
        import tempfile

        from f3rm_ext.synthetic import SynthConfig, synthesize

        with tempfile.TemporaryDirectory() as folder:
            config = SynthConfig(num_images=number, width=320, height=240, seed=seed)
            return some_of(synthesize(Path(folder, "room"), config, progress=False), number)

    return make


def _c(half: str, what: str, make: Callable[[Path], Photos], **options: object) -> MadeCapture:
    return MadeCapture(half, what, make, **options)  # type: ignore[arg-type]


A, B = "choose", "judge"
BOTH = ("incremental", "global")
CAPTURES: dict[str, MadeCapture] = {
    # real photos, and renders that look like them
    "fox_20": _c(A, "every other photo of the fox", lambda d: some_of(d / "fox", 20, last=40), mappers=BOTH),
    "fox_9": _c(B, "nine photos of the fox", lambda d: some_of(d / "fox", 9, first=10), mappers=BOTH),
    "fox_5": _c(A, "five photos of the fox", lambda d: some_of(d / "fox", 5)),
    "dtu_18": _c(B, "DTU scan 24", lambda d: some_of(d / "dtu_scan24", 18), mappers=BOTH),
    "dtu_8": _c(A, "eight photos of DTU scan 24", lambda d: some_of(d / "dtu_scan24", 8, last=30)),
    "dtu_4": _c(B, "four photos of DTU scan 24", lambda d: some_of(d / "dtu_scan24", 4)),
    "tabletop_20": _c(B, "scanned objects on a table", lambda d: some_of(d / "tabletop", 20), mappers=BOTH),
    "tabletop_10": _c(A, "ten photos of the table", lambda d: some_of(d / "tabletop", 10, first=40)),
    "tabletop_5": _c(B, "five photos of the table", lambda d: some_of(d / "tabletop", 5)),
    "chair_24": _c(A, "chair without background", lambda d: some_of(d / "chair", 24)),
    "chair_30": _c(B, "chair without background", lambda d: some_of(d / "chair", 30, first=30)),
    "synth_24": _c(A, "the project's room", _synth(24, 0), mappers=BOTH),
    "synth_8": _c(A, "the project's room, eight photos", _synth(8, 2)),
    # rooms with texture
    "papered": _c(A, "papered room, outwards", lambda _: room(six(papered, 1), around(16, 0.9, 1)), mappers=BOTH),
    "papered_across": _c(B, "papered room, across", lambda _: room(six(papered, 2), across(14, 1.5, 2)), mappers=BOTH),
    "mirror": _c(B, "papered room with a mirror",
                 lambda _: room([None, *six(papered, 3)[1:]], around(16, 0.9, 3))),
    # nothing to hold on to
    "plain": _c(A, "plain walls, outwards", lambda _: room(six(plain, 1), around(16, 0.9, 1))),
    "plain_sockets": _c(B, "plain walls with many sockets",
                        lambda _: room(six(lambda s: plain(s, 12), 3), around(16, 0.9, 3))),
    "faint": _c(A, "faint wallpaper", lambda _: room(six(lambda s: papered(s, 0.06), 4), around(16, 0.9, 4))),
    # the same thing in several places
    "posters": _c(A, "the same poster on four plain walls", lambda _: room(
        [postered(plain(k), 70) for k in range(4)] + [plain(4), plain(5)], around(16, 0.9, 6))),
    "posters_paper": _c(B, "the same poster on four papered walls", lambda _: room(
        [postered(papered(k, 0.4), 71) for k in range(4)] + [papered(4, 0.4), papered(5, 0.4)], around(16, 0.9, 7))),
    "two_walls": _c(A, "opposite walls alike, floor not",
                    lambda _: room([papered(1), papered(1), papered(2), papered(2), papered(3), plain(4)],
                                   around(16, 0.9, 8))),
    "four_walls": _c(B, "all walls alike, plain floor",
                     lambda _: room([papered(5)] * 4 + [plain(6), plain(7)], around(16, 0.9, 9))),
    "tiles": _c(A, "tiled walls", lambda _: room([papered(8, 1, 5)] * 4 + [papered(9, 1, 5)] * 2, around(16, 0.9, 10))),
    "corridor": _c(A, "corridor with equal doors",
                   lambda _: room(_corridor(6, 1), along(16, 4.5, 1), size=_TALL)),
    "corridor_few": _c(B, "corridor with equal doors, fewer photos",
                       lambda _: room(_corridor(5, 2), along(14, 4.5, 2), size=_TALL)),
    # no parallax
    "turning": _c(A, "turning on the spot", lambda _: room(six(papered, 6), around(16, 0.0, 12))),
    "turning_nearly": _c(B, "turning nearly on the spot", lambda _: room(six(papered, 7), around(16, 0.01, 13))),
    # spoilt photos
    "fox_blurred": _c(A, "fox, blurred and noisy", lambda d: changed(some_of(d / "fox", 16, last=40), noisy(5, 12))),
    "tabletop_noisy": _c(B, "table, very noisy", lambda d: changed(some_of(d / "tabletop", 20), noisy(1.5, 40))),
    "fox_cut": _c(B, "fox, parts of photos", lambda d: changed(some_of(d / "fox", 16), cut(0.5))),
    "dtu_cut": _c(A, "DTU scan 24, parts of photos", lambda d: changed(some_of(d / "dtu_scan24", 20), cut(0.6))),
    "dashboard": _c(A, "table behind a dashboard", lambda d: changed(some_of(d / "tabletop", 16), on_top(0.35))),
    "turntable": _c(A, "chair turned before a wall", lambda d: before_wall(some_of(d / "chair", 20), 80)),
    "flipped": _c(B, "fox, every other photo mirrored", lambda d: _flipped(some_of(d / "fox", 16, first=5))),
    "flipped_dtu": _c(A, "DTU scan 24, every other photo mirrored", lambda d: _flipped(some_of(d / "dtu_scan24", 20))),
    # two scenes
    "two_scenes": _c(A, "table and DTU scan 24 mixed", lambda d: [
        *some_of(d / "tabletop", 10, last=30), *of_scene(some_of(d / "dtu_scan24", 10), "b")]),
    "two_rooms": _c(B, "two rooms with the same poster", lambda _: [
        *room([postered(papered(20, 0.5), 90), *six(papered, 11)[1:]], around(12, 0.9, 15)),
        *of_scene(room([postered(papered(30, 0.5), 90), *six(papered, 12)[1:]], around(12, 0.9, 16), seed=1), "b")]),
    "two_plain_rooms": _c(A, "two plain rooms with the same poster", lambda _: [
        *room([postered(plain(k), 91 + k % 4) for k in range(4)] + [plain(4), plain(5)], around(12, 0.9, 17)),
        *of_scene(room([postered(plain(k + 20), 93 + k) for k in range(4)] + [plain(24), plain(25)],
                       around(12, 0.9, 18), seed=1), "b")]),
}  # fmt: skip


def _flipped(photos: Photos) -> Photos:
    """Every other photo shows the mirrored scene, which no camera of the first one sees."""
    mirror = np.diag([-1.0, 1, 1, 1])
    flip = Image.Transpose.FLIP_LEFT_RIGHT
    return [
        photo if k % 2 == 0 else TruePhoto(photo.picture.transpose(flip), mirror @ photo.pose @ mirror, "mirror")
        for k, photo in enumerate(photos)
    ]
