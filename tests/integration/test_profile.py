"""``--profile-tensors True`` and ``f3rm-ext profile``, typed as a user types them, for both kinds of methods."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

METHODS = {
    "f3rm-ext-lite": (
        *("--pipeline.datamanager.train-num-rays-per-batch", 256, "--pipeline.datamanager.features.extractors"),
        *("dense-daisy", "--pipeline.datamanager.features.cache-dir", "cache"),
    ),
    "sugar-ext-lite": (
        *("--pipeline.model.num-random", 2000, "--pipeline.datamanager.num-downscales", 0),
        *("--pipeline.model.regularization", "none"),
    ),
}
COUNT = """
import gc, json, sys, torch
sys.argv = sys.argv[1:]
from nerfstudio.scripts.train import entrypoint
from f3rm_ext.profiling import profiler

take = profiler.take_census

def take_and_count(*parts, **options):
    found = take(*parts, **options)
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    live = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}
    print("COUNTED", json.dumps([sum(live.values()), sum(one.bytes for one in found)]))
    return found

profiler.take_census = take_and_count
entrypoint()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_profiled_and_explained(
    run_command: Callable[..., Any], f3rm_ext: Callable[..., Any], tiny_capture: Path, tmp_path: Path, method: str
) -> None:
    arguments = (
        *("ns-train", method, "--data", tiny_capture, "--output-dir", tmp_path / "outputs", "--experiment-name", "e"),
        *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--machine.device-type", "cpu"),
        *("--max-num-iterations", 9, "--timestamp", "t", "--profile_tensors", "True", "--profile-tensors-every", 4),
        *("--steps-per-eval-image", 5),
        *(tmp_path / part if part == "cache" else part for part in METHODS[method]),
    )
    done = run_command("python", "-c", COUNT, *arguments).succeeds()
    counted = [json.loads(line.split(" ", 1)[1]) for line in done.text.splitlines() if line.startswith("COUNTED")]
    assert len(counted) == 3
    for live, categories in counted:
        assert categories == pytest.approx(live, rel=0.01), "categories add up to the tensors' bytes"

    run = tmp_path / "outputs" / "e" / method / "t"
    records = [json.loads(line) for line in (run / "tensor_profile.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["start", *["snapshot"] * 3, "end"]
    last = records[-2]
    assert last["step"] == 8 and last["categories"]["images"] > 0 and last["activations"] > 0
    assert last["categories"]["optimizer"] > 1.9 * last["categories"]["gradients"] > 0
    assert {phase for record in records[1:-1] for phase in record["phases"]} >= {"train", "evaluation"}
    assert ("densify" in records[1]["phases"]) == method.startswith("sugar")
    finish = [record["step"] for record in records[1:-1] if "finish" in record["phases"]]
    assert finish == ([8] if method.startswith("sugar") else []), "cleaning and lifting follow the last step"

    done = f3rm_ext(
        "profile", "latest", "--outputs", tmp_path / "outputs", "--compare", run, "--out", tmp_path / "charts"
    ).succeeds()
    told = " ".join(done.stdout.split())
    largest = "hash tables" if method.startswith("f3rm") else "harmonics"
    assert f"The largest parameters are {largest}" in told and "Compared" in told
    assert Image.open(tmp_path / "charts" / "tensor_profile.png").width > 800
    assert "What to change" in (tmp_path / "charts" / "tensor_profile.html").read_text()


def test_a_run_without_a_profile_is_one_sentence(f3rm_ext: Callable[..., Any], no_features: Path) -> None:
    sentence = f3rm_ext("profile", no_features).refuses()
    assert sentence.endswith("has no profile: train it with --profile-tensors True.")
    assert "There is no profile below" in f3rm_ext("profile", "latest", "--outputs", no_features.parent).refuses()
