"""How far cameras are off that are recovered from noisy ray maps, by way of recovery.

    python benchmarks/ray_recovery.py --out benchmarks/results/ray_recovery.json

Cameras look at the origin from all sides; their 16 × 16 ray maps get Gaussian noise on the homogeneous unit vectors.
The peer is the released code's split of the homography into orthogonal × lower, written down here from its description:
it is right only where the principal point is in the middle of the image.
"""

import argparse
import datetime
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from f3rm_ext.sfm import recovery
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.rays import cell_centers, map_points, normalized, render_maps

NOISES = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PRINCIPALS = ((0.0, 0.0), (0.1, 0.05), (0.3, -0.2))
"""Principal points off the middle, in halves of the image's side."""
SIDE_PX = 224.0


def make_cameras(count: int, focal: float, principal: Sequence[float], generator: torch.Generator) -> CameraSet:
    """Cameras at distances around 2 that look near the origin."""
    eyes = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator, dtype=torch.float64), dim=1)
    eyes = eyes * (1.5 + torch.rand(count, 1, generator=generator, dtype=torch.float64))
    forward = torch.nn.functional.normalize(0.2 * torch.randn(count, 3, generator=generator).double() - eyes, dim=1)
    up = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator).double(), dim=1)
    right = torch.nn.functional.normalize(torch.linalg.cross(forward, up), dim=1)
    rotations = torch.stack([right, torch.linalg.cross(forward, right), forward], dim=2)
    sizes = torch.full((count, 2), SIDE_PX, dtype=torch.float64)
    middle = torch.tensor(principal, dtype=torch.float64) * SIDE_PX / 2 + SIDE_PX / 2
    return CameraSet(rotations, eyes, sizes * focal / 2, middle.expand(count, 2).clone(), sizes)


def recover_by_lower_split(maps: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations and focal lengths as the released code splits them, but with our homography."""
    rows, cols = maps.shape[-2:]
    origins, endpoints = (points.flatten(1, 2) for points in map_points(maps.double()))
    world = endpoints - recovery.mean_centers(origins)[:, None]
    plane = cell_centers(sizes, rows, cols).flatten(1, 2) / (SIDE_PX / 2) - 1
    plane = torch.cat([plane, torch.ones_like(plane[..., :1])], dim=-1)
    rotations, focals = [], []
    for rays in zip(plane, world, strict=True):
        A = recovery.fit_homography(*rays)
        reversed_, _ = torch.linalg.qr(A.flip(1))
        Q = reversed_.flip(1)
        Q = Q * torch.einsum("ij,ij->j", Q, A).sign()
        L = Q.T @ A
        rotations.append(Q)
        focals.append(L[2, 2] / L.diagonal()[:2])
    return torch.stack(rotations), torch.stack(focals) * SIDE_PX / 2


def errors(rotations: Tensor, focals: Tensor, centers: Tensor, true: CameraSet) -> dict[str, float]:
    """Medians over the cameras."""
    difference = rotations.mT @ true.rotations
    cosine = (difference.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
    sine = (difference - difference.mT).flatten(1).norm(dim=1) / math.sqrt(8)
    return {
        "rotation_deg": float(torch.rad2deg(torch.atan2(sine, cosine)).median()),
        "focal_percent": float(100 * (focals / true.focals_px - 1).abs().mean(1).median()),
        "center": float((centers - true.centers).norm(dim=1).median()),
    }


def measure(count: int, seed: int) -> list[dict[str, object]]:
    """All rows of the table."""
    rows: list[dict[str, object]] = []
    for principal in PRINCIPALS:
        generator = torch.Generator().manual_seed(seed)
        cameras = make_cameras(count, 3.4, principal, generator)
        depth = cameras.centers.norm(dim=1)[:, None, None] + 0.3 * torch.randn(count, 16, 16, generator=generator)
        clean, true = render_maps(cameras, depth), cameras.from_first()
        for noise in NOISES:
            maps = normalized(clean + noise * torch.randn(clean.shape, generator=generator).double())
            ways: tuple[tuple[str, tuple[Tensor, Tensor] | recovery.Unknown, recovery.Center], ...] = (
                ("known K, mean centre", (cameras.focals_px, cameras.principals_px), "mean"),
                ("known K, intersection", (cameras.focals_px, cameras.principals_px), "intersection"),
                ("unknown focal length", "focal", "mean"),
                ("unknown K, QR", "all", "mean"),
            )
            for name, intrinsics, center in ways:
                found = recovery.recover_cameras(maps, cameras.sizes_px, intrinsics, center)
                made = errors(found.rotations, found.focals_px, found.centers, true)
                rows.append({"principal": principal, "noise": noise, "recovery": name, **made})
            rotations, focals = recover_by_lower_split(maps, cameras.sizes_px)
            centers = recovery.mean_centers(map_points(maps)[0].flatten(1, 2))
            made = errors(rotations, focals, centers, true)
            rows.append({"principal": principal, "noise": noise, "recovery": "unknown K, released split", **made})
    return rows


def main() -> None:
    """Measures, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cameras", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measure(options.cameras, options.seed)
    print("| principal point | noise | recovery | rotation, ° | focal length, % | centre |")
    print("|---|--:|---|--:|--:|--:|")
    for row in rows:
        x, y = row["principal"]  # type: ignore[misc]
        print(
            f"| ({x}, {y}) | {row['noise']:g} | {row['recovery']} | {row['rotation_deg']:.2g} | "
            f"{row['focal_percent']:.2g} | {row['center']:.2g} |"
        )
    if options.out is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "options": {"cameras": options.cameras, "seed": options.seed, "cells": 16, "focal_ndc": 3.4},
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
