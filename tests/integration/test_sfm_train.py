"""``f3rm-ext sfm prepare`` and ``sfm train`` as a user types them, on a small model."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.diffusion.co3d_lists import convert_captures

pytest.importorskip("accelerate")
pytest.importorskip("diffusers")
Typed = Callable[..., Any]
BIN = Path(sys.executable).parent
PASTED = """accelerate launch --multi_gpu --gpu_ids 0,1,2,3,4,5,6,7 --num_processes 8 train.py training.batch_size=8
training.max_iterations=400000 model.num_images=8 dataset.name=co3d debug.project_name=diffusionsfm_co3d
debug.run_name=co3d_diffusionsfm_sparse""".split()
PASTED_DENSE = """accelerate launch --multi_gpu --gpu_ids 0,1,2,3,4,5,6,7 --num_processes 8 train.py
training.batch_size=4
training.max_iterations=800000 model.num_images=8 dataset.name=co3d debug.project_name=diffusionsfm_co3d
debug.run_name=co3d_diffusionsfm_dense training.dpt_head=True training.full_num_patches_x=256
training.full_num_patches_y=256 training.gradient_clipping=True training.reinit=True training.freeze_encoder=True
model.freeze_transformer=True training.pretrain_path=sparse.pth""".split()


@pytest.fixture(scope="module")
def debug_settings(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and data for seconds."""
    root = tmp_path_factory.mktemp("room_data")
    convert_captures([tiny_capture], root, "room")
    torch.manual_seed(0)
    torch.save(VisionTransformer.from_size(64, 2, 2, 14).state_dict(), root / "vit.pth")
    return [
        *("model.size=tiny", f"model.encoder_weights={root / 'vit.pth'}", "model.num_images=3"),
        *(f"dataset.path={root}", "dataset.category=room", "dataset.image_size=28", "debug.wandb=False"),
        *("training.full_num_patches_x=2", "training.full_num_patches_y=2", "training.batch_size=2"),
        *("training.num_workers=0", "training.interval_save_checkpoint=3", "training.interval_evaluate=0"),
    ]


def newest(folder: Path) -> dict[str, Any]:
    return torch.load(sorted((folder / "checkpoints").glob("*.pth"))[-1], weights_only=True)


def test_captures_become_data(f3rm_ext: Typed, tiny_capture: Path, tmp_path: Path) -> None:
    done = f3rm_ext("sfm", "prepare", "--output", tmp_path, "--category", "room", "--captures", tiny_capture).succeeds()
    assert "9 images to train with and 3 to test with" in done.stdout
    assert (tmp_path / "co3d_annotations" / "room_train.jgz").is_file()


def test_a_published_command_prints_its_plan(f3rm_ext: Typed) -> None:
    done = f3rm_ext("sfm", "train", "--plan", "--", *PASTED).succeeds()
    assert "8 scenes on each of 8 processes, 64 in total" in done.stdout and "400,000" in done.stdout
    assert "GPU memory at the peak of a step" in done.stdout and "activations" in done.stdout


def test_a_resumed_run_equals_an_uninterrupted_one(f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("training.max_iterations=6", f"hydra.run.dir={whole}", "training.interval_evaluate=6")
    done = f3rm_ext("sfm", "train", *debug_settings, *more).succeeds()
    assert "step 6 of 6" in done.stdout and "step 6, held-out sets: RRA@15" in done.stdout
    done = f3rm_ext("sfm", "train", *debug_settings, "training.max_iterations=3", f"hydra.run.dir={parts}").succeeds()
    # As if it had been killed in step 5, while it wrote a checkpoint.
    (parts / "checkpoints" / "ckpt_00000004.pth").write_bytes(b"PK")
    with (parts / "losses.jsonl").open("a") as stream:
        stream.write('{"step": 4, "loss": 1.0, "seconds": 0.1}\n{"step": 5, "lo')
    more = ("training.max_iterations=6", f"hydra.run.dir={parts}", "train.resume=True")
    done = f3rm_ext("sfm", "train", *debug_settings, *more).succeeds()
    assert "Resuming at step 3" in done.stdout and "damaged ckpt_00000004.pth" in done.stdout
    one, two = newest(whole), newest(parts)
    assert one["iteration"] == two["iteration"] == 6
    for name, value in one["state_dict"].items():
        assert torch.equal(value, two["state_dict"][name]), name
    losses = [json.loads(line)["loss"] for line in (whole / "losses.jsonl").read_text().splitlines()]
    assert losses == [json.loads(line)["loss"] for line in (parts / "losses.jsonl").read_text().splitlines()]


def test_the_published_commands_train_with_debug_settings(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path
) -> None:
    """The settings of each command stay; the debug ones make model, data and steps small. The dense stage begins with
    the sparse model."""
    sparse, dense = tmp_path / "sparse", tmp_path / "dense"
    first = PASTED.index("train.py") + 1
    # Two steps for a batch of 1 are one step for a batch of 2.
    steps = ("training.max_iterations=2", "training.iterations_for_batch=1", f"hydra.run.dir={sparse}")
    done = f3rm_ext("sfm", "train", *PASTED[first:], *debug_settings, *steps).succeeds()
    settings = [
        *PASTED_DENSE[first:],
        *debug_settings,
        *("training.full_num_patches_x=32", "training.full_num_patches_y=32", "training.reinit_after=3"),
        *("training.max_iterations=4", f"hydra.run.dir={dense}"),
        f"training.pretrain_path={sparse / 'checkpoints' / 'ckpt_00000001.pth'}",
    ]
    done = f3rm_ext("sfm", "train", *settings).succeeds()
    before, after = newest(sparse)["state_dict"], newest(dense)["state_dict"]
    # Unfrozen after three of four steps.
    assert not torch.equal(before["transformer.input.weight"], after["transformer.input.weight"])
    assert not torch.equal(before["encoder.vit.cls_token"], after["encoder.vit.cls_token"])
    assert [group["lr"] for group in newest(dense)["optimizer"]["param_groups"]] == pytest.approx(
        [1e-4, 1e-5, 1e-5 / 256]
    ), "the head, what was pre-trained, and the convolution of the rays, which has 256 cells"
    # A checkpoint was saved in the step that unfroze them: a run that goes on from there is the same.
    (dense / "checkpoints" / "ckpt_00000004.pth").unlink()
    done = f3rm_ext("sfm", "train", *settings, "training.resume=True").succeeds()
    assert "Resuming at step 3" in done.stdout
    resumed = newest(dense)["state_dict"]
    assert all(torch.equal(value, resumed[name]) for name, value in after.items())
    for step, unfrozen_after in ((5, 100), (6, 3)):  # frozen again, and not
        more = ("training.resume=True", f"training.max_iterations={step}", f"training.reinit_after={unfrozen_after}")
        f3rm_ext("sfm", "train", *settings, *more).succeeds()
        assert newest(dense)["iteration"] == step
    other = f3rm_ext("sfm", "train", *settings, "training.resume=True", "model.residual=False").refuses()
    assert "model.residual=False" in other and "True" in other
    again = [word for word in settings if not word.startswith("training.pretrain_path")]
    wrong = f"training.pretrain_path={dense / 'checkpoints' / 'ckpt_00000006.pth'}"
    again.append(f"hydra.run.dir={tmp_path / 'again'}")
    assert "dense" in f3rm_ext("sfm", "train", *again, wrong).refuses()


def test_a_new_training_touches_no_checkpoint_of_another(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "outputs" / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (700, 800):
        (checkpoints / f"ckpt_{step:08d}.pth").write_bytes(b"of another run")
    settings = [word for word in debug_settings if not word.startswith("hydra.run.dir")]
    said = f3rm_ext("sfm", "train", *settings, "training.max_iterations=1").refuses()
    assert "ckpt_00000800.pth" in said and "training.resume=True" in said and "hydra.run.dir" in said
    assert [path.read_bytes() for path in checkpoints.iterdir()] == [b"of another run"] * 2


def test_missing_weights_of_the_encoder_are_named_by_their_setting(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    without = [word for word in debug_settings if not word.startswith("model.encoder_weights")]
    for more in ((), (f"model.encoder_weights={tmp_path / 'none.pth'}",)):
        assert "model.encoder_weights=" in f3rm_ext("sfm", "train", *without, *more).refuses()


def test_a_pickle_is_refused_without_advice_to_run_it(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path
) -> None:
    import pickle

    class Code:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    path = tmp_path / "run" / "checkpoints" / "ckpt_00000001.pth"
    path.write_bytes(pickle.dumps({"settings": Code()}))
    for more in ("training.resume=True", f"training.pretrain_path={path}"):
        folder = tmp_path / ("run" if "resume" in more else "new")
        said = f3rm_ext("sfm", "train", *debug_settings, f"hydra.run.dir={folder}", more).refuses()
        assert path.name in said and "weights_only" not in said
    assert not (tmp_path / "ran").exists()


def test_a_test_list_that_is_too_short_is_told(f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path) -> None:
    more = ("model.num_images=5", "training.interval_evaluate=1", "training.max_iterations=1", "training.batch_size=1")
    done = f3rm_ext("sfm", "train", *debug_settings, *more, f"hydra.run.dir={tmp_path / 'run'}").succeeds()
    assert "Nothing is evaluated while training: No sequence in" in done.stdout and "held-out sets" not in done.stdout


def test_mistakes(f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    assert "to resume" in f3rm_ext("sfm", "train", *debug_settings, folder, "training.resume=True").refuses()
    missing = f"training.pretrain_path={tmp_path / 'none.pth'}"
    assert missing.partition("=")[2] in f3rm_ext("sfm", "train", *debug_settings, folder, missing).refuses()
    assert "batch_size" in f3rm_ext("sfm", "train", "training.batchsize=3").refuses()
    # Neither a launcher nor data are asked first.
    for launcher in ((), ("--", *PASTED[: PASTED.index("train.py") + 1])):
        refused = f3rm_ext("sfm", "train", "--preset", "dense", *launcher, "dataset.path=nowhere").refuses()
        assert "would freeze a transformer with random weights: give training.pretrain_path=" in refused
    nan = f3rm_ext("sfm", "train", *debug_settings, folder, "training.lr=1e30", "training.max_iterations=5").refuses()
    assert "training.mixed_precision=False" in nan


def test_an_image_that_a_worker_cannot_read_is_one_sentence(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path
) -> None:
    (root,) = (word.partition("=")[2] for word in debug_settings if word.startswith("dataset.path="))
    shutil.copytree(root, tmp_path / "data")
    for path in (tmp_path / "data" / "co3d").rglob("*.jpg"):
        path.write_bytes(b"broken")
    more = (f"dataset.path={tmp_path / 'data'}", "training.num_workers=1", f"hydra.run.dir={tmp_path / 'run'}")
    assert "cannot be read" in f3rm_ext("sfm", "train", *debug_settings, *more).refuses()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_saves_and_goes_on(
    number: int,
    code: int,
    f3rm_ext: Typed,
    debug_settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from f3rm_ext.sfm.diffusion.training import Training

    step = Training.step

    def stop(training: Training, sample: Any) -> float:
        if training.iteration == 1:
            os.kill(os.getpid(), number)
        return step(training, sample)

    command = ("sfm", "train", *debug_settings, "training.max_iterations=9", f"hydra.run.dir={tmp_path / 'run'}")
    with monkeypatch.context() as context:
        context.setattr(Training, "step", stop)
        done = f3rm_ext(*command)
    assert done.code == code and "step 2 of 9" in done.stdout and "training.resume=True" in done.stdout
    assert newest(tmp_path / "run")["iteration"] == 2
    done = f3rm_ext(*command, "training.resume=True").succeeds()
    assert "Resuming at step 2" in done.stdout and newest(tmp_path / "run")["iteration"] == 9


def test_a_folder_that_cannot_be_written_is_one_sentence(
    f3rm_ext: Typed, debug_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    said = f3rm_ext("sfm", "train", *debug_settings, f"hydra.run.dir={tmp_path / 'file' / 'run'}").refuses()
    assert "hydra.run.dir" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "losses.jsonl").symlink_to("/dev/full")
    said = f3rm_ext("sfm", "train", *debug_settings, f"hydra.run.dir={tmp_path / 'full'}").refuses()
    assert "losses.jsonl cannot be written" in said

    def write_in_part(content: object, file: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470")

    monkeypatch.setattr(torch, "save", write_in_part)
    command = ("sfm", "train", *debug_settings, "training.max_iterations=1", f"hydra.run.dir={tmp_path / 'run'}")
    assert "make room" in f3rm_ext(*command).refuses()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_weights_that_are_not_finite_are_not_saved(debug_settings: list[str], tmp_path: Path) -> None:
    from f3rm_ext.errors import ConfigError
    from f3rm_ext.sfm.diffusion.settings import parse_settings
    from f3rm_ext.sfm.diffusion.training import Training, make_accelerator

    training = Training(parse_settings([*debug_settings, f"hydra.run.dir={tmp_path}"]), make_accelerator()[0])
    # A run in float16 that goes on from one in bfloat16, which has no scale of gradients.
    training.scaler = torch.amp.GradScaler("cpu")
    training._restore_optimizer({"optimizer": training.optimizer.state_dict(), "scaler": {}})
    assert training.scaler.get_scale() == 2**16
    with torch.no_grad():
        next(training.network.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match="not finite"):
        training.save()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.release), "accelerate"])
def test_two_processes_train_as_one_with_both_batches(
    launcher: str, f3rm_ext: Typed, run_command: Typed, debug_settings: list[str], tmp_path: Path
) -> None:
    settings = [*debug_settings, "training.max_iterations=3", "training.mixed_precision=False"]
    one, two = tmp_path / "one", tmp_path / "two"
    done = f3rm_ext("sfm", "train", *settings, "training.batch_size=4", f"hydra.run.dir={one}").succeeds()
    of_two = [*settings, "training.batch_size=2", f"hydra.run.dir={two}"]
    if launcher == "torchrun":
        program = ("torchrun", "--nproc-per-node", 2, "--no-python", BIN / "f3rm-ext", "sfm", "train")
    else:
        options = ("--multi_gpu", "--gpu_ids", "0,1", "--num_processes", 2, "--mixed_precision", "bf16")
        script = ("accelerate", "launch", *options, "train.py")
        program = ("f3rm-ext", "sfm", "train", "--", *script)
    done = run_command(*program, *of_two, fresh=True, OMP_NUM_THREADS="1").succeeds()
    assert done.stdout.count("2 scenes on each of 2 processes, 4 in total") == 1
    assert ("accelerate's mixed precision (bf16) is not used" in done.stdout) == (launcher == "accelerate")
    losses = [
        [json.loads(line)["loss"] for line in (run / "losses.jsonl").read_text().splitlines()] for run in (one, two)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[1]) == 3
    whole, halves = newest(one)["state_dict"], newest(two)["state_dict"]
    for name, value in whole.items():
        torch.testing.assert_close(halves[name], value, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.release
@pytest.mark.timeout(300)
def test_processes_of_a_launcher_save_when_they_are_stopped(debug_settings: list[str], tmp_path: Path) -> None:
    options = ("--multi_gpu", "--gpu_ids", "0,1", "--num_processes", "2")
    settings = [*debug_settings, "training.max_iterations=100000", f"hydra.run.dir={tmp_path / 'run'}"]
    settings.append("training.interval_save_checkpoint=100000")
    command = [str(BIN / "f3rm-ext"), "sfm", "train", "--", "accelerate", "launch", *options, "train.py", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 10 "))
        process.terminate()
        assert process.wait() == 143
        said = process.stdout.read()
    assert said.count("Stopped at step") == 1
    assert newest(tmp_path / "run")["iteration"] >= 10


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_memory_that_runs_out_is_one_sentence(
    stage: str, debug_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from f3rm_ext.errors import MemoryShortageError
    from f3rm_ext.sfm.diffusion.settings import parse_settings
    from f3rm_ext.sfm.diffusion.training import Training, make_accelerator

    step = Training.step

    def short_of_memory(training: Training, sample: Any) -> float:
        if training.iteration == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(training, sample)

    monkeypatch.setattr(Training, "step", short_of_memory)
    words = [*debug_settings, f"hydra.run.dir={tmp_path / 'run'}", "training.max_iterations=6"]
    if stage == "dense":
        words += ["training.dpt_head=True", *(f"training.full_num_patches_{axis}=32" for axis in "xy")]
    settings = parse_settings(words)
    with pytest.raises(MemoryShortageError) as raised:
        Training(settings, make_accelerator()[0]).run()
    said = str(raised.value)
    assert "step 4 on cpu" in said and "training.batch_size=1" in said and "training.resume=True" in said
    settings = parse_settings([*words, "training.resume=True", "training.mixed_precision=False"])
    with pytest.raises(MemoryShortageError, match=r"resume .*training\.mixed_precision=True"):
        Training(settings, make_accelerator()[0]).run()
    monkeypatch.undo()
    settings = parse_settings([*words, "training.resume=True", "training.batch_size=1"])  # as it says
    Training(settings, make_accelerator()[0]).run()
    assert newest(tmp_path / "run")["iteration"] == 6
