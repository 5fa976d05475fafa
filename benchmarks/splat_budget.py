r"""Splats to a budget: quality at shares of the size, beside pruning by opacity, and pages of many Gaussians.

    ns-train sugar-ext-lite --data fox --max-num-iterations 1200 --sh-degree 2 \
        --pipeline.datamanager.camera-res-scale-factor 0.25 --pipeline.model.densify.max-gaussians 40000
    python benchmarks/splat_budget.py measure --runs fox=outputs/fox/sugar-ext-lite/.../config.yml
    python benchmarks/splat_budget.py page --run outputs/tabletop/sugar-ext-lite/.../config.yml --text banana hammer

*measure* chooses what `f3rm-ext export splats --max-mb` writes as .spz. *page* makes a run of many Gaussians out of one
with features, each of whose Gaussians becomes several smaller ones inside it, and runs `f3rm-ext export page` on that.
Both print rows and write results/splat_budget.json, which keeps the rows of other runs.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from commands import BIN
from processes import write_report

RESULT = Path(__file__).parent / "results" / "splat_budget.json"
GAUSSIANS = "_model.gauss_params."


def write_rows(kind: str, key: str, name: object, rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of one kind whose key has this name."""
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for row in rows:
        print(row, flush=True)
    kept = [row for row in report.get(kind, ()) if row[key] != name]
    report |= {kind: [*kept, *rows]}
    write_report(report, RESULT)


@dataclass(kw_only=True)
class Measure:
    """Measures what is lost at shares of the size."""

    runs: tuple[str, ...]
    """Runs of sugar-ext, as NAME=config.yml."""
    shares: tuple[float, ...] = (0.75, 0.5, 0.25)
    """Shares of the size of the whole file."""

    def main(self) -> None:
        """Measures all runs."""
        for run in self.runs:
            name, _, config = run.partition("=")
            write_rows("rows", "capture", name, self._rows(name, Path(config)))

    def _rows(self, name: str, config: Path) -> list[dict[str, Any]]:
        import torch

        from f3rm_ext.export.budget import BudgetSearch, SplatBudget
        from f3rm_ext.export.splats import export_run, load_splat_run
        from f3rm_ext.splat.files.pruning import export_size

        out = Path("splats.spz")
        run = load_splat_run(config)
        budget = SplatBudget(run, out)
        everything = torch.arange(len(budget.gaussians))

        def size_of(rows: torch.Tensor, degree: int) -> int:
            splats = budget.gaussians[rows].to_sh_degree(degree)
            return export_size(splats, out, lambda splats, path: export_run(run, path, splats=splats))

        degree = budget.gaussians.sh_degree
        whole = size_of(everything, degree)
        facts = {
            "capture": name,
            "gaussians": len(everything),
            "sh_degree": degree,
            "mb": whole / 1e6,
            "full_psnr": budget.psnr(budget.gaussians),
            "whole_psnr": budget.stored_psnr(everything, degree),
        }
        rows = []
        for share in self.shares:
            start = time.process_time()
            kept = BudgetSearch(budget, budget.order().last, size_of).fit_size(share * whole, range(degree, -1, -1))
            seconds = time.process_time() - start
            opaque_first = budget.gaussians.alphas().argsort(descending=True)
            by_opacity = BudgetSearch(budget, lambda count, rows=opaque_first: rows[:count], size_of)
            row = {
                "share": share,
                "kept": len(kept.rows),
                "kept_degree": kept.sh_degree,
                "kept_mb": size_of(kept.rows, kept.sh_degree) / 1e6,
                "psnr": kept.psnr,
                "opacity_psnr": by_opacity.fit_size(share * whole, range(degree, -1, -1)).psnr,
                "search_cpu_s": seconds,
            }
            rows.append({**facts, **row})
        return rows


@dataclass(kw_only=True)
class Page:
    """Measures `f3rm-ext export page` of many Gaussians."""

    run: Path
    """config.yml of a run of sugar-ext with features."""
    text: tuple[str, ...]
    """Texts of the questions."""
    gaussians: int = 500_000
    """Number of Gaussians of the page."""
    max_mb: tuple[float, ...] = (20.0,)
    """Limits, MB."""

    def main(self) -> None:
        """Makes the run and the pages."""
        with tempfile.TemporaryDirectory() as folder:
            config = multiply(self.run.parent, Path(folder) / "run", self.gaussians)
            for limit in self.max_mb:
                write_rows("pages", "max_mb", limit, [self._row(config, Path(folder) / "page.html", limit)])

    def _row(self, config: Path, out: Path, max_mb: float) -> dict[str, Any]:
        command = [str(BIN / "f3rm-ext"), "export", "page", "--load-config", str(config), "--out", str(out)]
        command += ["--max-mb", str(max_mb), "--text", *self.text]
        start = time.perf_counter()
        child = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
        _, status, used = os.wait4(child, 0)
        if status:
            sys.exit(f"{' '.join(command)} ended with status {status}.")
        return {
            "gaussians": self.gaussians,
            "questions": len(self.text),
            "max_mb": max_mb,
            "mb": out.stat().st_size / 1e6,
            "seconds": time.perf_counter() - start,
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_mb": used.ru_maxrss * 1024 / 1e6,
        }


def multiply(run: Path, out: Path, count: int) -> Path:
    """Makes a run with a number of Gaussians out of one with fewer, and returns its config.yml.

    Args:
        run: folder of a run.
        out: folder to write.
        count: number of Gaussians; each is drawn inside one of the run's, and is about 0.4 times as large.
    """
    import torch

    from f3rm_ext.splat.gaussians import quats_to_rotations

    shutil.copytree(run, out, ignore=shutil.ignore_patterns("nerfstudio_models", "events*"))
    source = max((run / "nerfstudio_models").glob("*.ckpt"))
    state = torch.load(source, map_location="cpu", weights_only=True)
    values, noise = state["pipeline"], torch.Generator().manual_seed(0)
    few = len(values[GAUSSIANS + "means"])
    rows = torch.arange(count) % few
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == few:
            values[name] = value[rows]

    def vary(name: str, amount: float) -> None:
        value = values[name].float()
        changed = value + amount * torch.randn(value.shape, generator=noise)
        values[name] = changed.to(values[name].dtype)

    inside = values[GAUSSIANS + "scales"].exp() * torch.randn(count, 3, generator=noise)
    values[GAUSSIANS + "means"] += torch.einsum("nij,nj->ni", quats_to_rotations(values[GAUSSIANS + "quats"]), inside)
    values[GAUSSIANS + "scales"] -= 0.9
    for name in ("scales", "quats", "opacities", "features_dc", "features_rest"):
        vary(GAUSSIANS + name, 0.05)
    for name in values:
        if name.endswith(".codes"):
            vary(name, 0.02)
    folder = out / "nerfstudio_models"
    folder.mkdir()
    torch.save({"step": state["step"], "pipeline": values}, folder / source.name)
    return out / "config.yml"


if __name__ == "__main__":
    tyro.cli(Measure | Page).main()  # type: ignore[arg-type]
