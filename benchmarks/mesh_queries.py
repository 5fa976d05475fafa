r"""Queries to meshes with features: how well they find the labelled objects of a capture, with times and memory.

    python benchmarks/mesh_queries.py --data room --meshes true=room/gt_mesh.npz
    python benchmarks/mesh_queries.py --data room --meshes tsdf=mesh_extraction/room-true-depth.ply
    python benchmarks/mesh_queries.py --data room --meshes true=room/gt_mesh.npz --vertices 5000 --texture-size 1024

Each mesh, in the frame of the capture, gets label features by `f3rm-ext features lift-mesh`, and `f3rm-ext eval query
--mesh` queries every class by its name. With --vertices, the mesh is simplified first, textured, and lifted twice: onto
vertices alone, and with a code map. If the mesh file has a label for each vertex, they are compared too, also those
that no photo sees. Each row is printed and written to results/mesh_queries.json, which keeps the rows of other captures
and meshes.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh
import tyro
from processes import call, read_report, write_report

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.mesh.cleaning import clean, simplify
from f3rm_ext.mesh.mesh_files import read_mesh, write_mesh
from f3rm_ext.mesh.semantics.feature_file import features_path, load_features
from f3rm_ext.mesh.semantics.mesh_run import open_mesh_run
from f3rm_ext.query.builders import text_queries
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.metrics import QueryMetrics

HERE = Path(__file__).parent
TABLE, TABLE_EDGE_M = 1, 0.05
"""Label of the table that the captures of objects on a table have, and length of the edges that it is divided into."""
MADE_BY = {"made_by": "f3rm-ext export mesh", "frame": "capture"}


def with_table(mesh: trimesh.Trimesh, file: Path) -> trimesh.Trimesh:
    """The mesh with the table that objects stand on, if the file has it apart as a box."""
    if file.suffix != ".npz":
        return mesh
    with np.load(file) as archive:
        if "table_box" not in archive:
            return mesh
        half, middle = archive["table_box"].astype(float)
    box = trimesh.creation.box(2 * half).apply_translation(middle).subdivide_to_size(TABLE_EDGE_M)
    return trimesh.util.concatenate([mesh, box])  # type: ignore[return-value]


@dataclass
class MeshQueries:
    """Measures queries to meshes with label features."""

    data: Path
    """The capture, with label and depth images."""
    meshes: tuple[str, ...]
    """Meshes as NAME=FILE, in the frame of the capture."""
    vertices: int = 0
    """Simplify to so many vertices first, texture the result and compare vertices with a code map; 0 does not."""
    texture_size: int = 1024
    """Side of that texture."""
    work: Path = Path("mesh_queries")
    """Folder of the meshes."""
    out: Path = HERE / "results" / "mesh_queries.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Lifts and measures."""
        self.work.mkdir(parents=True, exist_ok=True)
        for named in self.meshes:
            name, file = named.split("=", 1)
            mesh = with_table(read_mesh(Path(file)), Path(file))
            if self.vertices:
                path = self._textured(mesh, name)
                name = f"{name}, {self.vertices:,} vertices"
                self._write({"mesh": name, "features": "vertices", **self._measure(path)})
                self._write({"mesh": name, "features": "texels", **self._measure(path, "--code-map")})
            else:
                path = self.work / f"{self.data.name}-{name}.ply"
                plain = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)
                write_mesh(path, plain, MADE_BY)
                labels = self._labels(Path(file), len(mesh.vertices))
                self._write({"mesh": name, "features": "vertices", **self._measure(path, labels=labels)})

    def _textured(self, mesh: trimesh.Trimesh, name: str) -> Path:
        mesh.merge_vertices(merge_tex=True, merge_norm=True)
        coarse, path = self.work / f"{self.data.name}-{name}-coarse.ply", self.work / f"{self.data.name}-{name}.glb"
        write_mesh(coarse, simplify(clean(mesh), self.vertices), MADE_BY)
        command = ["f3rm-ext", "export", "texture", "--data", self.data, "--mesh", coarse, "--out", path]
        call([*command, "--texture-size", self.texture_size, "--padding", 1])
        return path

    @staticmethod
    def _labels(file: Path, count: int) -> np.ndarray | None:
        if file.suffix != ".npz":
            return None
        with np.load(file) as archive:
            if "vertex_label" not in archive:
                return None
            labels = archive["vertex_label"]
        return np.concatenate([labels, np.full(count - len(labels), TABLE)])

    def _measure(self, path: Path, *options: str, labels: np.ndarray | None = None) -> dict[str, Any]:
        scores = path.with_suffix(".json")
        lift = [
            "f3rm-ext",
            "features",
            "lift-mesh",
            "--mesh",
            path,
            "--data",
            self.data,
            "--cache-dir",
            self.work / "cache",
        ]
        call([*lift, "--extractors", f"labels:data={self.data}", *options])
        began = time.perf_counter()
        call(["f3rm-ext", "eval", "query", "--mesh", path, "--out", scores])
        seconds = time.perf_counter() - began
        found, mesh = json.loads(scores.read_text())["protocols"], read_mesh(path)
        features = load_features(features_path(path), mesh)
        row: dict[str, Any] = {
            "vertices": len(mesh.vertices),
            "triangles": len(mesh.faces),
            "unseen": float((~features.visible).mean()),
            "lift_s": features.provenance["seconds"],
            "lift_peak_mib": features.provenance["peak_mib"],
            "eval_s": seconds,
            "features_mib": features_path(path).stat().st_size / 2**20,
        }
        for protocol in ("direct-3d", "rendered", "image-features"):
            row[protocol] = {key: found[protocol][key] for key in ("pairs", "localisation", "miou", "macc")}
        if labels is not None:
            row["surface"] = self._on_vertices(path, labels)
        return row

    def _on_vertices(self, path: Path, labels: np.ndarray) -> dict[str, float | int]:
        """Compares the scores of all vertices with their labels."""
        run, truth, metrics = open_mesh_run(path), CaptureGroundTruth(self.data), QueryMetrics()
        (head,) = run.model.query_heads().values()
        queries = text_queries(head, truth.classes, TextEncoder(), "common")
        scores = torch.from_numpy(run.model.score_vertices(queries))
        for index, thing in enumerate(truth.things):
            mask = torch.from_numpy(labels == thing.label)
            if mask.any():
                metrics.add(thing.name, scores[:, index], mask)
        return {key: metrics.summary()[key] for key in ("pairs", "localisation", "miou", "macc")}

    def _write(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        captures = read_report(self.out).get("captures", {})
        rows = {(old["mesh"], old["features"]): old for old in captures.get(self.data.name, ())}
        rows[row["mesh"], row["features"]] = row
        captures[self.data.name] = list(rows.values())
        write_report({"captures": captures}, self.out)


if __name__ == "__main__":
    tyro.cli(MeshQueries).main()
