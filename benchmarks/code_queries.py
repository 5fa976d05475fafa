"""What queries cost, and what they lose, when PCA codes are asked instead of full features.

    python benchmarks/code_queries.py --data fox --weights WEIGHTS

The basis is fitted to the training photos; asked are the patches of the held-out ones, by examples (random patches of
training photos) and, where the features understand it, by texts. Three ways to make cosines of codes are compared with
those of the full features:

- *residual*: the norm of what the codes of each patch leave out is stored and counted (as in the feature store),
- *constant*: its mean over the training photos stands for it (as along rays, where it is not known),
- *ignored*: the cosine of the codes as if there were nothing else.

Prints a Markdown table and writes results/code_queries.json.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from processes import write_report
from torch.nn import functional

from f3rm_ext.features.extractors.registry import build_extractor, extractor_name, understands_text
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.pca_codes import code_cosine, encode, principal_rows, project_query, second_moment
from f3rm_ext.features.source import prepare_features
from f3rm_ext.query.relevancy import relevancy
from f3rm_ext.scripts.features import Extract

TEXTS = ("a fox", "a face", "an ear", "a wall", "a window", "wood", "grass", "a person")
NEGATIVES = ("object", "things", "stuff", "texture")
TEMPERATURE, REPEATS = 0.1, 101


@dataclass
class Features:
    """2D features of a capture."""

    name: str
    train: list[torch.Tensor]
    """Maps, (rows, cols, D)."""
    held_out: list[torch.Tensor]
    """Likewise."""
    texts: dict[str, torch.Tensor]
    """Positives and negatives, unit vectors; empty where texts are not understood."""


@dataclass
class CodeQueries:
    """Compares queries to PCA codes with queries to full features."""

    data: Path
    """The capture."""
    weights: Path
    """Folder with the weights of DINOv2 (dinov2_vits14_saliency_fp16.pth) and conse."""
    scale: float = 0.25
    """Factor of the image size."""
    codes: tuple[int, ...] = (32, 64, 128)
    """Numbers of codes."""
    examples: int = 64
    """Queries by example."""
    out: Path = Path(__file__).parent / "results" / "code_queries.json"
    """Where to write."""

    def main(self) -> None:
        """Measures and writes."""
        torch.manual_seed(0)
        dino = f"dinov2:weights={self.weights / 'dinov2_vits14_saliency_fp16.pth'},layers=6+7+8+9"
        rows = [row for spec in (dino, f"conse:weights={self.weights}") for row in self._rows(self._load(spec))]
        print("| " + " | ".join(rows[0]) + " |\n|---" * 1 + "|---" * (len(rows[0]) - 1) + "|")
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        report = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "options": {"scale": self.scale, "examples": self.examples, "texts": list(TEXTS)},
            "rows": rows,
        }
        write_report(report, self.out)

    def _load(self, spec: str) -> Features:
        options = FeatureOptions(extractors=(spec,))
        datasets = Extract(data=self.data, features=options, camera_res_scale_factor=self.scale)._datasets()
        name, sources = extractor_name(spec), prepare_features(datasets, options, device="cpu")
        maps = [
            [torch.from_numpy(np.array(source.load(i)[name].values)).float() for i in range(len(data))]
            for source, data in zip(sources, datasets, strict=True)
        ]
        texts = {}
        if understands_text(spec):
            extractor: Any = build_extractor(spec, device=torch.device("cpu"))
            texts = {
                "positives": functional.normalize(extractor.encode_text(TEXTS).float(), dim=-1),
                "negatives": functional.normalize(extractor.encode_text(NEGATIVES).float(), dim=-1),
            }
        return Features(name, maps[0], maps[-1], texts)

    def _rows(self, features: Features) -> list[dict[str, Any]]:
        dim = features.train[0].shape[-1]
        moment = second_moment(features.train, dim, torch.device("cpu"))
        patches = torch.cat([m.reshape(-1, dim) for m in features.train])
        chosen = patches[torch.randperm(len(patches))[: self.examples]]
        asked = {"example": (functional.normalize(chosen, dim=-1), functional.normalize(patches.mean(0), dim=0)[None])}
        if features.texts:
            asked["text"] = (features.texts["positives"], features.texts["negatives"])
        rows = []
        for how, (positives, negatives) in asked.items():
            full = _Asked([functional.normalize(m, dim=-1) @ positives.T for m in features.held_out])
            full_negative = [functional.normalize(m, dim=-1) @ negatives.T for m in features.held_out]
            at_full = _time_ms(torch.cat([m.reshape(-1, dim) for m in features.held_out]), positives)
            row = {"features": features.name, "by": how, "codes": dim, "energy": 1.0, "cosines": "full"}
            rows.append(row | {"mean": 0.0, "p99": 0.0, "relevancy": 0.0, "best": 1.0, "ms": at_full})
            for codes in self.codes:
                basis, energy = principal_rows(moment, codes)
                kept = float(sum(energy[:codes]))
                maps = [encode(basis, m) for m in features.held_out]
                took = _time_ms(torch.cat([m.reshape(-1, codes + 1) for m in maps])[:, :codes], positives[:, :codes])
                for way in ("residual", "constant", "ignored"):
                    found = _Asked([_cosines(m, basis, positives, way, kept) for m in maps])
                    negative = [_cosines(m, basis, negatives, way, kept) for m in maps]
                    error = (found.flat - full.flat).abs()
                    score = _relevancies(found.maps, negative) - _relevancies(full.maps, full_negative)
                    row = {"features": features.name, "by": how, "codes": codes, "energy": round(kept, 4)}
                    row |= {"cosines": way, "mean": round(float(error.mean()), 4)}
                    row |= {"p99": round(float(np.quantile(error.numpy(), 0.99)), 4)}
                    row |= {"relevancy": round(float(score.abs().mean()), 4)}
                    rows.append(row | {"best": round(found.same_best(full), 3), "ms": took})
        return rows


class _Asked:
    """Cosines of all queries in all photos."""

    def __init__(self, maps: list[torch.Tensor]) -> None:
        self.maps = maps

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([m.flatten() for m in self.maps])

    def same_best(self, other: "_Asked") -> float:
        """Share of pairs of query and photo with the same best patch, or one next to it."""
        near = []
        for mine, theirs in zip(self.maps, other.maps, strict=True):
            cols = mine.shape[1]
            a, b = (m.flatten(0, 1).argmax(dim=0) for m in (mine, theirs))
            away = torch.maximum((a // cols - b // cols).abs(), (a % cols - b % cols).abs())
            near.append((away <= 1).float().mean())
        return float(torch.stack(near).mean())


def _cosines(
    encoded: torch.Tensor, basis: torch.Tensor, queries: torch.Tensor, way: str, energy: float
) -> torch.Tensor:
    """Cosines of a map of codes, residual norm last, with unit queries of the full space: (rows, cols, queries)."""
    codes, residual = encoded[..., :-1], encoded[..., -1]
    asked = project_query(basis, queries)
    ones = torch.ones(len(asked))
    if way == "residual":
        return code_cosine(asked, ones, codes[..., None, :], residual[..., None])
    if way == "constant":
        return code_cosine(asked, ones, codes[..., None, :]) * energy**0.5
    return code_cosine(asked, asked.norm(dim=-1), codes[..., None, :])


def _relevancies(positive: list[torch.Tensor], negative: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(positive, negative, strict=True)
    return torch.cat([relevancy(p[..., None], n[..., None, :], TEMPERATURE).flatten() for p, n in pairs])


def _time_ms(patches: torch.Tensor, queries: torch.Tensor) -> float:
    """Median time of the cosines of all patches with all queries, ms."""
    contiguous, columns = patches.contiguous(), queries.T.contiguous()

    def run() -> torch.Tensor:
        return contiguous @ columns / contiguous.norm(dim=1, keepdim=True)

    return _median_ms(run)


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 3)


if __name__ == "__main__":
    tyro.cli(CodeQueries).main()
