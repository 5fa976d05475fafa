"""Splat rendering on this machine's CPU: numba kernels beside a plain vectorised torch tile renderer, same run.

OMP_WAIT_POLICY=passive python benchmarks/rasterize_cpu.py    # 20,000 Gaussians at 256 × 256 on 1 and 2 threads
python benchmarks/rasterize_cpu.py --count 5000 --size-px 128

The environment variable keeps the idle threads of torch from spinning on the cores that numba's threads need.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import torch
from processes import write_report
from torch_tiles import render as torch_tiles

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import rasterize
from f3rm_ext.splat.rasterize.camera import Camera

Quartiles = tuple[float, float, float]
Render = Callable[..., list[torch.Tensor]]


def quartiles(tasks: Sequence[Callable[[], object]], repeats: int) -> list[tuple[Quartiles, float]]:
    """Quartiles of the times of calls taken in turns, ms, after a warm-up; with each, CPU time of the main thread.

    The main thread does its share of the tiles and then sleeps: its median CPU time is what the call would take if no
    other program wanted the cores.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in tasks]
    for repeat in range(repeats + 1):
        for task, found in zip(tasks, times, strict=True):
            wall, cpu = time.perf_counter(), time.thread_time()
            task()
            if repeat:
                found.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)))
    results = []
    for found in times:
        q1, median, q3 = (round(value, 2) for value in statistics.quantiles([wall for wall, _ in found], n=4))
        results.append(((q1, median, q3), round(statistics.median(cpu for _, cpu in found), 2)))
    return results


def as_row(forward: tuple[Quartiles, float], both: tuple[Quartiles, float]) -> dict[str, Any]:
    """Times by name."""
    return {
        "forward_ms": forward[0],
        "forward_cpu_ms": forward[1],
        "forward_backward_ms": both[0],
        "forward_backward_cpu_ms": both[1],
    }


class Scene:
    """Gaussians filling a cube in front of a camera, and gradients that come back from the picture."""

    def __init__(self, count: int, size_px: int, mean_size: float, channels: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.gaussians = (
            torch.rand(count, 3, generator=generator) * 2 - 1,
            torch.randn(count, 4, generator=generator),
            mean_size * torch.exp(0.5 * torch.randn(count, 3, generator=generator)),
            torch.rand(count, generator=generator) * 0.9 + 0.05,
            torch.rand(count, channels, generator=generator),
        )
        viewmat, half = torch.eye(4), size_px / 2
        viewmat[2, 3] = 3.0
        focal = 1.1 * size_px
        K = torch.tensor([[focal, 0.0, half], [0.0, focal, half], [0.0, 0.0, 1.0]])
        self.camera = Camera(viewmat, K, size_px, size_px)
        self.upstream = [torch.randn(size_px, size_px, *tail, generator=generator) for tail in ((channels,), (), ())]
        self.leaves = tuple(value.clone().requires_grad_() for value in self.gaussians)

    def ours(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Colours, depth and accumulation."""
        rendered = rasterize(Ellipsoids(*values[:4]), values[4], self.camera, backend="numba")
        return [rendered.colors, rendered.depth, rendered.alpha]

    def peer(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The same by the plain renderer."""
        return list(torch_tiles(Ellipsoids(*values[:4]), values[4], self.camera))

    def picture(self, render: Render) -> list[torch.Tensor]:
        """The picture alone."""
        with torch.no_grad():
            return render(*self.gaussians)

    def gradients(self, render: Render) -> tuple[torch.Tensor, ...]:
        """All gradients."""
        return torch.autograd.grad(render(*self.leaves), self.leaves, self.upstream)


def agreement(scene: Scene) -> float:
    """Largest relative difference of pictures and gradients, by norm: both must do the same work."""
    pairs = list(zip(scene.picture(scene.ours), scene.picture(scene.peer), strict=True))
    pairs += list(zip(scene.gradients(scene.ours), scene.gradients(scene.peer), strict=True))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def use_threads(threads: int) -> None:
    """Lets torch and numba work on so many threads."""
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)


def measure(render: Render, scene: Scene, repeats: int) -> dict[str, Any]:
    """Times of one renderer on one thread."""
    use_threads(1)
    forward, both = quartiles([lambda: scene.picture(render), lambda: scene.gradients(render)], repeats)
    print(f"  {render.__name__}: {forward}, {both} ms", file=sys.stderr)
    return as_row(forward, both)


def scaling(scene: Scene, threads: list[int], repeats: int) -> list[dict[str, Any]]:
    """Times of our renderer by threads, taken in turns, so that other users of the cores disturb all alike."""

    def on(number: int, task: Callable[[Render], object]) -> Callable[[], None]:
        def run() -> None:
            use_threads(number)
            task(scene.ours)

        return run

    tasks = [on(number, task) for number in threads for task in (scene.picture, scene.gradients)]
    times = quartiles(tasks, repeats)
    rows = []
    for place, number in enumerate(threads):
        forward, both = times[2 * place : 2 * place + 2]
        rows.append({"threads": number, **as_row(forward, both)})
        print(f"  ours, {number} thread(s): {forward}, {both} ms", file=sys.stderr)
    return rows


def lifting_rows(size_px: int, count: int, mean_size: float, repeats: int) -> list[dict[str, Any]]:
    """Time to add a feature picture up with every Gaussian's weights: gradients of colours alone."""
    use_threads(1)
    rows = []
    for channels in (16, 64, 128):
        scene = Scene(count, size_px, mean_size, channels)
        colors = torch.zeros(count, 1, requires_grad=True)

        def lift(scene=scene, colors=colors, channels=channels) -> None:
            wide = colors.expand(-1, channels)
            rendered = rasterize(Ellipsoids(*scene.gaussians[:4]), wide, scene.camera).colors
            torch.autograd.grad(rendered, wide, scene.upstream[0])

        rows.append({"channels": channels, "threads": 1, "ms": quartiles([lift], repeats)[0][0]})
        print(f"  lifting {channels} channels: {rows[-1]['ms']} ms", file=sys.stderr)
    return rows


def main() -> None:
    """Prints times and writes results/rasterize_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="Gaussians")
    parser.add_argument("--size-px", type=int, default=256, help="side of the picture")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rasterize_cpu.json")
    options = parser.parse_args()

    threads = [1, 2] if numba.get_num_threads() > 1 else [1]
    repeats = options.repeats
    rows: list[dict[str, Any]] = []
    errors: dict[str, float] = {}
    scenes = {"small": 0.01, "large": 0.025}
    for label, mean_size in scenes.items():
        scene = Scene(options.count, options.size_px, mean_size)
        radii = rasterize(Ellipsoids(*scene.gaussians[:4]), scene.gaussians[4], scene.camera).radii
        name = f"{label}, radius {radii[radii > 0].float().mean():.0f} px"
        errors[name] = agreement(scene)
        print(f"{name}: relative difference {errors[name]:.1e}", file=sys.stderr)
        # The peer gets one thread: its small operations do not gain from a second, and lose where cores are shared.
        rows.append({"scene": name, "renderer": "torch tiles", "threads": 1, **measure(scene.peer, scene, repeats)})
        rows += [{"scene": name, "renderer": "numba", **row} for row in scaling(scene, threads, 4 * repeats)]
    lifting = lifting_rows(options.size_px, options.count, scenes["small"], repeats)

    report = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__},
        "options": {"count": options.count, "size_px": options.size_px, "repeats": options.repeats},
        "relative_difference": errors,
        "rows": rows,
        "lifting": lifting,
    }
    write_report(report, options.out)


if __name__ == "__main__":
    main()
