"""How long training takes beside what a plan says after twenty steps.

python benchmarks/plan_time.py             # writes results/plan_time.json

`f3rm-ext plan --probe` and the whole run take turns, on the synthetic room. A run's time is that of its training loop,
with what evaluation and checkpoints take; loading is not part of it.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from plan_memory import in_child, write_rows

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, tuple[str, ...]] = {
    "f3rm-ext-lite": ("--pipeline.datamanager.train-num-rays-per-batch", "512"),
    "sugar-ext-lite": (),
}
PHOTOS, WIDTH_PX, HEIGHT_PX = 12, 160, 120


def arguments_of(method: str, capture: Path, steps: int) -> list[str]:
    """Returns the arguments of ns-train for a run of some steps."""
    kept = str(capture.parent / "features")
    cache = ("--pipeline.datamanager.features.cache-dir", kept) if method.startswith("f3rm") else ()
    common = ("--max-num-iterations", str(steps), "--vis", "tensorboard", "--logging.local-writer.enable", "False")
    return ["--data", str(capture), *common, *METHODS[method], *cache]


def make_capture(folder: Path) -> dict[str, Any]:
    """Writes the synthetic room."""
    from f3rm_ext.synthetic import SynthConfig, synthesize

    room = SynthConfig(PHOTOS, width=WIDTH_PX, height=HEIGHT_PX, seed=1, light_rays=1, holdout_every=4)
    return {"capture": str(synthesize(folder, room, progress=False))}


def probed(method: str, arguments: list[str]) -> dict[str, Any]:
    """Returns the time that a plan tells, seconds, and the time that it takes to find out."""
    from f3rm_ext.planning.question import parse
    from f3rm_ext.planning.throughput import probe

    config, begin = parse(method, arguments), time.perf_counter()
    told = probe(config).duration_s(config.max_num_iterations)
    return {"told_s": told, "probe_s": time.perf_counter() - begin}


def trained(method: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Trains and returns the time of the training loop, seconds."""
    from f3rm_ext.planning.question import parse

    config = parse(method, [*arguments, "--output-dir", str(folder), "--timestamp", "now"])
    torch.manual_seed(config.machine.seed)
    trainer = config.setup()
    trainer.setup()
    begin = time.perf_counter()
    trainer.train()
    return {"took_s": time.perf_counter() - begin}


def measure(method: str, capture: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Returns a row of the report."""
    arguments, rounds = arguments_of(method, capture, steps), []
    in_child(lambda: probed(method, arguments))  # extracts features
    for number in range(repeats):
        folder = capture.parent / f"{method}-{number}"
        found = in_child(lambda: probed(method, arguments))
        rounds.append(found | in_child(lambda folder=folder: trained(method, arguments, folder)))
        print(method, *(f"{name} {value:.1f}" for name, value in rounds[-1].items()), flush=True)
    return {"method": method, "steps": steps, "rounds": rounds}


def main() -> None:
    """Prints the rows and writes results/plan_time.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="of plan and run, in turns")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_time.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "room"
        in_child(lambda: make_capture(capture))  # here, its threads would be lost to the later children
        for method in METHODS:
            rows.append(measure(method, capture, options.steps, options.repeats))
            told, took = (statistics.median(one[key] for one in rows[-1]["rounds"]) for key in ("told_s", "took_s"))
            print(f"{method}: told {told:.1f} s, took {took:.1f} s, ratio {told / took:.3f}")
    write_rows(rows, options.out)


if __name__ == "__main__":
    main()
