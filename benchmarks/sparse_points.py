"""A copy of a capture with the points that structure from motion would find, for captures whose poses came without.

    python benchmarks/sparse_points.py --capture fox --out fox_points

matches SIFT features between neighbouring photos, keeps what fits the known poses, triangulates tracks of three photos
and more, and writes fox_points/sparse_pc.ply and a transforms.json that names it; photos are linked, not copied. Only
training frames are used where transforms.json has split lists, else all.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import tyro

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.utils.ply import write_ply

RATIO = 0.8
"""Lowe's: the nearest descriptor has to be this much nearer than the second."""


class Photo(NamedTuple):
    """Features of one photo."""

    rays: np.ndarray
    """(N, 2): undistorted positions on the plane z = 1 of the camera, y down."""
    descriptors: np.ndarray
    """(N, 128)."""
    colors: np.ndarray
    """(N, 3), 0 to 255."""
    w2c: np.ndarray
    """(3, 4): capture to camera, OpenCV axes."""
    focal: float
    """Pixels."""


@dataclass
class SparsePoints:
    """Makes the copy."""

    capture: Path
    """Folder with transforms.json."""
    out: Path
    """Folder of the copy; must not be there yet."""
    features: int = 4000
    """SIFT features per photo."""
    neighbours: int = 8
    """Photos each is matched with: the nearest that look in about the same direction."""
    most_error: float = 2.0
    """Largest distance of a point from its feature, pixels."""
    least_angle: float = 1.5
    """Smallest angle between two rays to a point, degrees."""

    def main(self) -> None:
        started = time.perf_counter()
        meta, folder = read_transforms(self.capture)
        photos = [self._read(frame, meta, folder) for frame in _training_frames(meta)]
        tracks = _tracks(self._matches(photos))
        found = [point for point in (self._triangulate(track, photos) for track in tracks) if point is not None]
        points = np.array(found)
        self.out.mkdir(parents=True)
        for entry in folder.iterdir():
            if entry.name not in ("transforms.json", "sparse_pc.ply"):
                (self.out / entry.name).symlink_to(entry.resolve())
        columns = {name: points[:, i].astype(np.float32) for i, name in enumerate("xyz")}
        columns |= {name: points[:, 3 + i].astype(np.uint8) for i, name in enumerate(("red", "green", "blue"))}
        with (self.out / "sparse_pc.ply").open("wb") as stream:
            write_ply(stream, columns)
        meta["ply_file_path"] = "sparse_pc.ply"
        (self.out / "transforms.json").write_text(json.dumps(meta, indent=1))
        print(f"{len(points)} points of {len(tracks)} tracks in {time.perf_counter() - started:.0f} s")

    def _read(self, frame: dict[str, Any], meta: dict[str, Any], folder: Path) -> Photo:
        lens = {**meta, **frame}
        image = cv2.imread(str(folder / frame["file_path"]))
        assert image is not None, frame["file_path"]
        grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        spots, descriptors = cv2.SIFT_create(self.features).detectAndCompute(grey, None)  # type: ignore[attr-defined]
        pixels = np.array([spot.pt for spot in spots], dtype=np.float64)
        K = np.array([[lens["fl_x"], 0, lens["cx"]], [0, lens.get("fl_y", lens["fl_x"]), lens["cy"]], [0, 0, 1]])
        bent = np.array([lens.get(name, 0.0) for name in ("k1", "k2", "p1", "p2", "k3")], dtype=np.float64)
        # nerfstudio's cx is from the image's corner, OpenCV's from the first pixel's centre.
        rays = cv2.undistortPoints((pixels + 0.5)[:, None], K, bent)[:, 0]
        c2w = np.array(frame["transform_matrix"], dtype=np.float64) @ np.diag([1.0, -1, -1, 1])
        rows, columns = pixels[:, 1].round().astype(int), pixels[:, 0].round().astype(int)
        colors = image[rows.clip(0, image.shape[0] - 1), columns.clip(0, image.shape[1] - 1), ::-1]
        return Photo(rays, descriptors, colors, np.linalg.inv(c2w)[:3], float(K[0, 0]))

    def _matches(self, photos: list[Photo]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Pairs of features, each as (photo, feature), that fit the poses."""
        centres = np.array([-photo.w2c[:, :3].T @ photo.w2c[:, 3] for photo in photos])
        forward = np.array([photo.w2c[2, :3] for photo in photos])
        matcher, pairs = cv2.BFMatcher(), []
        done: set[tuple[int, int]] = set()
        for i in range(len(photos)):
            apart = np.linalg.norm(centres - centres[i], axis=1)
            apart[(forward @ forward[i] < 0.7) | (apart == 0)] = np.inf
            for j in np.argsort(apart)[: self.neighbours]:
                pair = (min(i, int(j)), max(i, int(j)))
                if not np.isfinite(apart[j]) or pair in done:
                    continue
                done.add(pair)
                pairs += self._match(matcher, pair, photos)
        return pairs

    def _match(
        self, matcher: Any, pair: tuple[int, int], photos: list[Photo]
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        one, two = (photos[i] for i in pair)
        found = np.array(
            [
                (best.queryIdx, best.trainIdx)
                for best, second in matcher.knnMatch(one.descriptors, two.descriptors, k=2)
                if best.distance < RATIO * second.distance
            ]
        ).reshape(-1, 2)
        turn = two.w2c[:, :3] @ one.w2c[:, :3].T
        shift = two.w2c[:, 3] - turn @ one.w2c[:, 3]
        cross = np.array([[0, -shift[2], shift[1]], [shift[2], 0, -shift[0]], [-shift[1], shift[0], 0]])
        lines = _homogeneous(one.rays[found[:, 0]]) @ (cross @ turn).T
        off = np.abs((lines * _homogeneous(two.rays[found[:, 1]])).sum(axis=1)) / np.linalg.norm(lines[:, :2], axis=1)
        fits = off * two.focal < self.most_error
        return [((pair[0], int(a)), (pair[1], int(b))) for a, b in found[fits]]

    def _triangulate(self, track: list[tuple[int, int]], photos: list[Photo]) -> np.ndarray | None:
        """Place and colour (6,) of a track; None where its rays do not meet."""
        rows, rays, poses = [], [], []
        for photo, feature in track:
            pose, (x, y) = photos[photo].w2c, photos[photo].rays[feature]
            rows += [x * pose[2] - pose[0], y * pose[2] - pose[1]]
            rays.append((x, y))
            poses.append(pose)
        place = np.linalg.svd(np.array(rows))[2][-1]
        if abs(place[3]) < 1e-9:
            return None
        place = place[:3] / place[3]
        local = np.array(poses) @ np.append(place, 1.0)
        if (local[:, 2] <= 0).any():
            return None
        off = np.linalg.norm(local[:, :2] / local[:, 2:] - np.array(rays), axis=1)
        if (off * np.array([photos[photo].focal for photo, _ in track]) > self.most_error).any():
            return None
        sight = np.array([pose[:, :3].T @ (pose[:, :3] @ place + pose[:, 3]) for pose in poses])
        sight /= np.linalg.norm(sight, axis=1, keepdims=True)
        if (sight @ sight.T).min() > np.cos(np.deg2rad(self.least_angle)):
            return None
        return np.append(place, np.mean([photos[photo].colors[feature] for photo, feature in track], axis=0))


def _training_frames(meta: dict[str, Any]) -> list[dict[str, Any]]:
    names = {Path(name).name for name in meta.get("train_filenames", [])}
    return [frame for frame in meta["frames"] if not names or Path(frame["file_path"]).name in names]


def _homogeneous(points: np.ndarray) -> np.ndarray:
    return np.column_stack([points, np.ones(len(points))])


def _tracks(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Features that are matched with one another, of three photos and more, none of which they have two of."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root(feature: tuple[int, int]) -> tuple[int, int]:
        parent.setdefault(feature, feature)
        while parent[feature] != feature:
            parent[feature] = parent[parent[feature]]
            feature = parent[feature]
        return feature

    for one, two in pairs:
        parent[root(one)] = root(two)
    groups: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for feature in list(parent):
        groups[root(feature)].append(feature)
    return [track for track in groups.values() if len(track) >= 3 and len({photo for photo, _ in track}) == len(track)]


if __name__ == "__main__":
    tyro.cli(SparsePoints).main()
