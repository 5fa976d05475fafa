"""Training, resuming and being stopped, on a toy model under nerfstudio's own loop."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils.eval_utils import eval_load_checkpoint
from nerfstudio.utils.writer import GLOBAL_BUFFER

from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.optimizers import RunDecaySchedulerConfig
from f3rm_ext.engine.stopping import resume_command
from f3rm_ext.engine.trainer import F3rmTrainer, F3rmTrainerConfig
from f3rm_ext.errors import CheckpointError, ConfigError

LAST = 10
Train = Callable[..., F3rmTrainer]
MakeConfig = Callable[..., F3rmTrainerConfig]


@pytest.fixture
def whole(train: Train) -> F3rmTrainer:
    """Eleven steps at a stretch; checkpoints after steps 4, 8 and 10."""
    return train(LAST + 1, save_only_latest_checkpoint=False)


def steps(trainer: F3rmTrainer) -> list[int]:
    return [step for step, _ in checkpoint.newest_first(trainer.checkpoint_dir)]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def same_weights(first: F3rmTrainer, second: F3rmTrainer, step: int = LAST) -> bool:
    one, two = (checkpoint.load(checkpoint.make_path(run.checkpoint_dir, step))["pipeline"] for run in (first, second))
    return one.keys() == two.keys() and all(
        torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key]
        for key, value in one.items()
    )


class TestResume:
    @pytest.mark.parametrize("step", [4, 8])
    def test_goes_on_exactly_as_if_never_interrupted(self, train: Train, whole: F3rmTrainer, step: int) -> None:
        resumed = train(LAST + 1, load_dir=whole.checkpoint_dir, load_step=step, seed=7)
        assert resumed.pipeline.losses == {done: loss for done, loss in whole.pipeline.losses.items() if done > step}
        assert same_weights(resumed, whole)
        other = train(LAST + 1, seed=7)
        assert other.pipeline.losses != whole.pipeline.losses, "random numbers do not matter to the toy"

    def test_processes_of_several_devices_do_not_share_their_random_numbers(
        self, train: Train, whole: F3rmTrainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nerfstudio.utils.comms.get_rank", lambda: 1)
        second = train(LAST + 1, load_dir=whole.checkpoint_dir, load_step=4).pipeline.losses
        assert second.keys() == {5, 6, 7, 8, 9, 10}
        assert all(loss != whole.pipeline.losses[step] for step, loss in second.items())

    def test_a_training_that_begins_again_in_the_folder_of_a_longer_one_keeps_both(
        self, toy: ModuleType, make_config: MakeConfig, whole: F3rmTrainer, capsys: pytest.CaptureFixture
    ) -> None:
        def train(steps: int, **options: Any) -> F3rmTrainer:
            config = make_config(steps, **options)
            config.timestamp = whole.config.timestamp
            return toy.run(config)

        again = train(6)
        assert again.checkpoint_dir == whole.checkpoint_dir and steps(again) == [5, 4]
        earlier = again.checkpoint_dir.with_name(f"{again.checkpoint_dir.name}-earlier")
        assert [step for step, _ in checkpoint.newest_first(earlier)] == [10, 8, 4]
        assert earlier.name in "".join(capsys.readouterr().out.split())
        assert steps(train(8, load_dir=again.checkpoint_dir, load_step=4)) == [7, 4]

    def test_learning_rates_are_in_units_of_the_scene(
        self, toy: ModuleType, train: Train, whole: F3rmTrainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the model knows them; config.yml keeps what was asked for, so that they are not scaled twice."""
        monkeypatch.setattr(toy.ToyModel, "rate_factors", {"fields": 3.0, "others": 5.0}, raising=False)
        larger = train(LAST + 1, save_only_latest_checkpoint=False)
        resumed = train(LAST + 1, load_dir=larger.checkpoint_dir, load_step=4)
        rates = [run.optimizers.optimizers["fields"].param_groups[0]["lr"] for run in (whole, larger, resumed)]
        assert rates[1] == pytest.approx(3 * rates[0]) and rates[2] == pytest.approx(3 * rates[0])
        assert larger.config.optimizers["fields"]["optimizer"].lr == whole.config.optimizers["fields"]["optimizer"].lr

    def test_stops_at_max_num_iterations(self, train: Train, whole: F3rmTrainer) -> None:
        resumed = train(15, load_dir=whole.checkpoint_dir)
        assert list(resumed.pipeline.losses) == [11, 12, 13, 14]
        assert steps(resumed) == [14, 12]
        assert resumed.config.max_num_iterations == 15 == GLOBAL_BUFFER["max_iter"]

    def test_a_part_of_a_schedule_goes_on_as_the_whole(self, toy: ModuleType, make_config: MakeConfig) -> None:
        def make(steps: int, **options: Any) -> F3rmTrainerConfig:
            config = make_config(steps, **options)
            config.optimizers["fields"]["scheduler"] = RunDecaySchedulerConfig(lr_final=1e-3)
            return config

        whole = toy.run(make(10))
        part = toy.run(make(6, schedule_steps=10))
        rest = toy.run(make(10, load_dir=part.checkpoint_dir), seed=7)
        window = toy.run(make(8, schedule_steps=10, load_dir=part.checkpoint_dir), seed=7)
        assert {**part.pipeline.losses, **rest.pipeline.losses} == whole.pipeline.losses
        assert window.pipeline.losses == {step: whole.pipeline.losses[step] for step in (6, 7)}
        assert same_weights(rest, whole, 9)
        # Guards the test: a schedule as short as the part differs.
        assert toy.run(make(6)).pipeline.losses != part.pipeline.losses

    def test_a_schedule_shorter_than_the_run(self, make_config: MakeConfig) -> None:
        with pytest.raises(ConfigError, match=r"--schedule-steps.*5.*--max-num-iterations.*6"):
            make_config(6, schedule_steps=5).save_config()
        make_config(6, schedule_steps=6).check()

    def test_evaluation_has_no_graph(self, whole: F3rmTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs: list[bool] = []
        monkeypatch.setattr(Trainer, "eval_iteration", lambda *_, **__: graphs.append(torch.is_grad_enabled()))
        whole.eval_iteration(step=2)
        assert graphs == [False] and torch.is_grad_enabled()

    def test_callbacks_see_the_true_number_of_iterations(
        self, toy: ModuleType, make_config: MakeConfig, whole: F3rmTrainer, in_each_step: Callable[..., None]
    ) -> None:
        seen: list[int] = []
        config = make_config(13, load_dir=whole.checkpoint_dir)
        in_each_step(lambda step: seen.append(config.max_num_iterations))
        toy.run(config)
        assert seen == [13, 13]

    def test_accepts_the_run_folder_or_a_file(self, train: Train, whole: F3rmTrainer) -> None:
        resumed = train(LAST + 1, load_checkpoint=checkpoint.make_path(whole.checkpoint_dir, 8), seed=7)
        assert list(resumed.pipeline.losses) == [9, 10]
        assert list(train(12, load_dir=whole.base_dir).pipeline.losses) == [11]

    def test_passes_over_a_truncated_newest_checkpoint(
        self, train: Train, whole: F3rmTrainer, capsys: pytest.CaptureFixture
    ) -> None:
        truncate(checkpoint.make_path(whole.checkpoint_dir, LAST))
        resumed = train(LAST + 1, load_dir=whole.base_dir, seed=7)
        assert list(resumed.pipeline.losses) == [9, 10]
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count("Skipping damaged step-000000010.ckpt") == 1

    def test_finished_run_is_left_alone(
        self, toy: ModuleType, make_config: MakeConfig, whole: F3rmTrainer, capsys: pytest.CaptureFixture
    ) -> None:
        config = make_config(LAST + 1, load_dir=whole.base_dir, timestamp="again")
        with pytest.raises(SystemExit) as leaving:
            toy.run(config)
        assert leaving.value.code == 0 and "--max-num-iterations" in capsys.readouterr().out
        assert not config.get_base_dir().exists()

    def test_finished_run_is_not_trained_by_the_trainer_either(
        self, make_config: MakeConfig, whole: F3rmTrainer
    ) -> None:
        resumed = make_config(8, load_dir=whole.base_dir).setup(local_rank=0, world_size=1)
        resumed.setup()
        resumed.train()
        assert resumed.pipeline.losses == {} and steps(resumed) == []

    def test_other_model_is_one_sentence(self, toy: ModuleType, train: Train, whole: F3rmTrainer) -> None:
        with pytest.raises(CheckpointError, match=r"size mismatch .*config\.yml"):
            train(20, load_dir=whole.base_dir, pipeline=toy.ToyPipelineConfig(width=3))

    def test_missing_parameters_are_not_left_at_random(self, train: Train, whole: F3rmTrainer) -> None:
        path = checkpoint.make_path(whole.checkpoint_dir, LAST)
        state = checkpoint.load(path)
        del state["pipeline"]["model.layer.bias"]
        checkpoint.write(state, path)
        with pytest.raises(CheckpointError, match=r"lacks model.layer.bias"):
            train(20, load_dir=whole.base_dir)

    def test_checkpoint_of_nerfstudio_itself(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(F3rmTrainer, "save_checkpoint", Trainer.save_checkpoint)
        plain = train(6)
        monkeypatch.undo()
        resumed = train(8, load_dir=plain.base_dir)
        assert list(resumed.pipeline.losses) == [6, 7]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"load_dir": Path("nowhere")}, "nowhere .*--load-dir"),
            ({"load_checkpoint": Path("nowhere.ckpt")}, "nowhere.ckpt .*--load-checkpoint"),
        ],
    )
    def test_nothing_there_is_one_sentence_and_leaves_no_run_folder(
        self, toy: ModuleType, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            toy.run(toy.make_config(tmp_path / "out", 5, **options))
        assert not (tmp_path / "out").exists()

    def test_absent_step_names_those_there(self, make_config: MakeConfig, whole: F3rmTrainer) -> None:
        with pytest.raises(CheckpointError, match=r"step-000000005\.ckpt.*--load-step.*10, 8, 4"):
            make_config(20, load_dir=whole.base_dir, load_step=5).check()


class TestCheckpoints:
    def test_newest_and_one_spare_are_kept_or_all(self, train: Train, whole: F3rmTrainer) -> None:
        assert steps(train(14)) == [13, 12]
        assert steps(whole) == [10, 8, 4]
        # Nerfstudio parses every name in the folder.
        assert {path.suffix for path in whole.checkpoint_dir.iterdir()} == {".ckpt"}

    def test_final_step_is_not_written_twice(self, train: Train, watch_calls: Callable[..., Any]) -> None:
        writes = watch_calls(checkpoint, "write")
        train(9)
        assert [call.args[1].name for call in writes] == ["step-000000004.ckpt", "step-000000008.ckpt"]

    def test_stop_between_steps_is_saved_under_the_step_that_is_done(
        self, make_config: MakeConfig, in_each_step: Callable[..., None]
    ) -> None:
        config = make_config(9)
        config.save_config()
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        in_each_step(lambda step: trainer.shutdown() if step == 5 else None)
        trainer.train()
        assert trainer.step == 6  # what nerfstudio would have named the checkpoint
        assert steps(trainer) == [5, 4]

    def test_loads_in_plain_torch_with_nothing_allowed(self, whole: F3rmTrainer) -> None:
        code = (
            "import sys, torch; state = torch.load(sys.argv[1], weights_only=True);"
            "print(state['step'], state['f3rm_ext']['format'], state['f3rm_ext']['datamanager']['position'],"
            "type(state['schedulers']['fields']['_last_lr'][0]).__name__)"
        )
        path = checkpoint.make_path(whole.checkpoint_dir, LAST)
        result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        position = whole.pipeline.datamanager.position
        assert result.stdout.split() == ["10", "1", str(position), "float"]


class TestEvaluationLoading:
    """The steps of nerfstudio's ``eval_setup`` that concern us."""

    @staticmethod
    def load(trainer: F3rmTrainer) -> tuple[Path, int]:
        config = yaml.load((trainer.base_dir / "config.yml").read_text(), Loader=yaml.Loader)
        config.load_dir = config.get_checkpoint_dir()
        return eval_load_checkpoint(config, config.pipeline.setup())

    def test_takes_the_newest_that_is_not_truncated(self, whole: F3rmTrainer, capsys: pytest.CaptureFixture) -> None:
        assert self.load(whole) == (checkpoint.make_path(whole.checkpoint_dir, LAST), LAST)
        for step in (LAST, 8):
            truncate(checkpoint.make_path(whole.checkpoint_dir, step))
        assert self.load(whole)[1] == 4
        assert "Skipping damaged step-000000010.ckpt" in " ".join(capsys.readouterr().out.split())

    def test_load_step_of_the_run_it_was_resumed_from_does_not_matter(self, train: Train, whole: F3rmTrainer) -> None:
        resumed = train(LAST + 1, load_dir=whole.checkpoint_dir, load_step=4)
        for path in resumed.checkpoint_dir.glob("*-000000004.ckpt"):
            path.unlink()
        assert self.load(resumed)[1] == LAST

    def test_takes_those_beside_the_config_that_is_given(
        self, whole: F3rmTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run that was moved and renamed, and a copy of one that went on."""
        moved = Path(shutil.copytree(whole.base_dir, tmp_path / "moved"))
        checkpoint.make_path(moved / "nerfstudio_models", LAST).unlink()
        monkeypatch.setattr(sys, "argv", ["ns-eval", f"--load_config={moved / 'config.yml'}"])
        assert self.load(whole) == (checkpoint.make_path(moved / "nerfstudio_models", 8), 8)
        link = tmp_path / "link.yml"
        link.symlink_to(moved / "config.yml")
        monkeypatch.setattr(sys, "argv", ["ns-eval", "--load-config", str(link)])
        assert self.load(whole)[1] == 8
        shutil.rmtree(moved / "nerfstudio_models")
        assert self.load(whole)[1] == LAST

    def test_none_intact_is_one_sentence(self, whole: F3rmTrainer) -> None:
        for _, path in checkpoint.newest_first(whole.checkpoint_dir):
            truncate(path)
        with pytest.raises(CheckpointError, match=f"{re.escape(str(whole.checkpoint_dir))}.*damaged"):
            self.load(whole)

    def test_run_without_checkpoints_is_one_sentence(self, make_config: MakeConfig, tmp_path: Path) -> None:
        config = make_config(5)
        for folder in (tmp_path, config.get_base_dir() / "nerfstudio_models"):
            folder.mkdir(parents=True, exist_ok=True)
            with pytest.raises(CheckpointError, match=r"no checkpoint.*stopped before its first one"):
                config.get_checkpoint_dir()


class TestConfig:
    def test_keeps_what_the_data_decided(
        self, toy: ModuleType, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Commands that open the run later must not decide again."""
        config = make_config(1)
        config.pipeline.datamanager.fog = "auto"
        monkeypatch.setattr(toy.ToyData, "choices", {"fog": "dense"}, raising=False)
        trainer = toy.run(config)
        assert "fog: dense\n" in (trainer.base_dir / "config.yml").read_text()

    def test_config_file_gives_back_the_same_options(self, make_config: MakeConfig) -> None:
        config = make_config(5)
        config.save_config()
        loaded = yaml.load((config.get_base_dir() / "config.yml").read_text(), Loader=yaml.Loader)
        assert type(loaded) is F3rmTrainerConfig
        assert loaded == config
        assert vars(loaded).keys() == vars(config).keys()

    def test_device_that_is_not_there_leaves_no_run_folder(
        self, toy: ModuleType, tmp_path: Path, pretend_gpus: Callable[[int], None]
    ) -> None:
        pretend_gpus(0)
        config = toy.make_config(tmp_path / "out", 5)
        config.machine.device_type = "cuda"
        with pytest.raises(ConfigError, match=r"--machine.device-type cpu"):
            config.save_config()
        with pytest.raises(ConfigError, match=r"--machine.device-type cpu"):
            config.setup(local_rank=0, world_size=1)
        assert not (tmp_path / "out").exists()

    def test_a_run_folder_that_cannot_be_made(self, toy: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"--output-dir"):
            toy.make_config(tmp_path / "file", 5).save_config()

    @pytest.mark.parametrize("name", ["max_num_iterations", "steps_per_save", "profile_tensors_every"])
    def test_non_positive_steps(self, make_config: MakeConfig, name: str) -> None:
        config = make_config(5)
        setattr(config, name, 0)
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*0"):
            config.check()

    def test_viewer_of_ns_viewer_stays_local(self, set_command_line: Callable[..., None]) -> None:
        config = yaml.load(yaml.dump(F3rmTrainerConfig()), Loader=yaml.Loader)
        set_command_line("ns-viewer", "--load-config", "config.yml")
        config.viewer = ViewerConfig()  # what ns-viewer does
        assert config.viewer.websocket_host == "127.0.0.1"
        anywhere = ViewerConfig(websocket_host="0.0.0.0")
        assert F3rmTrainerConfig(viewer=anywhere).viewer.websocket_host == "0.0.0.0", "given at construction"

    def test_no_warnings_about_half_precision_on_the_cpu(self, make_config: MakeConfig) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer = make_config(5, mixed_precision=True).setup(local_rank=0, world_size=1)
        assert not trainer.mixed_precision and not trainer.grad_scaler.is_enabled()


class TestCuda:
    """What happens, and in which order, where the device is CUDA; up to the pipeline, which is not built."""

    @pytest.fixture
    def events(
        self, toy: ModuleType, monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None]
    ) -> list[str]:
        events: list[str] = []

        def stop(*_: Any, **__: Any) -> None:
            events.append("pipeline")
            raise EOFError("nothing is built here")

        pretend_gpus(8)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(f"device {device}"))
        monkeypatch.setattr(toy.ToyPipelineConfig, "setup", stop)
        return events

    @staticmethod
    def begin(config: F3rmTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        config.machine.device_type = "cuda"
        config.save_config()
        with pytest.raises(EOFError):
            config.setup(local_rank=local_rank, world_size=world_size).setup()

    def test_every_process_has_its_device_before_anything_allocates(
        self, make_config: MakeConfig, events: list[str]
    ) -> None:
        config = make_config(5)
        config.machine.num_devices = 4
        self.begin(config, local_rank=3, world_size=4)
        assert events == ["device 3", "pipeline"]

    def test_the_model_has_its_say_before_cuda_starts(self, make_config: MakeConfig, events: list[str]) -> None:
        config = make_config(5)
        config.pipeline.model = SimpleNamespace(fit_trainer=lambda trainer: events.append(trainer.method_name))
        self.begin(config)
        assert events.index("toy") < events.index("device 0") < events.index("pipeline")


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_stop_saves_says_how_to_go_on_and_loses_nothing(
        self,
        toy: ModuleType,
        make_config: MakeConfig,
        train: Train,
        whole: F3rmTrainer,
        monkeypatch: pytest.MonkeyPatch,
        in_each_step: Callable[..., None],
        capsys: pytest.CaptureFixture,
        number: int,
        code: int,
    ) -> None:
        config = make_config(LAST + 1)
        in_each_step(lambda step: os.kill(os.getpid(), number) if step == 6 else None)
        with pytest.raises(SystemExit) as leaving:
            toy.run(config)
        monkeypatch.undo()
        assert leaving.value.code == code
        folder = config.get_base_dir() / "nerfstudio_models"
        assert [step for step, _ in checkpoint.newest_first(folder)] == [6, 4]
        error = capsys.readouterr().err
        assert "Saved up to step 6" in error and f"--load-dir {folder}" in error

        resumed = train(LAST + 1, load_dir=folder, seed=7)
        assert resumed.pipeline.losses == {step: loss for step, loss in whole.pipeline.losses.items() if step > 6}

    def test_stop_concludes_as_a_finished_run_does(
        self, toy: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch, in_each_step: Callable[..., None]
    ) -> None:
        concluded: list[int] = []

        def conclude(step: int) -> None:
            concluded.append(step)

        callback = TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN], conclude)
        monkeypatch.setattr(toy.ToyPipeline, "get_training_callbacks", lambda *_: [callback])
        in_each_step(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 6 else None)
        with pytest.raises(SystemExit):
            train(LAST + 1)
        assert concluded == [6]

    def test_stop_in_the_last_step_is_a_finished_run(self, train: Train, in_each_step: Callable[..., None]) -> None:
        in_each_step(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)
        assert steps(train(3)) == [2]

    def test_stop_while_the_last_checkpoint_is_written_lets_it_finish(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = checkpoint.write

        def interrupt(state: dict[str, Any], path: Path) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            write(state, path)

        monkeypatch.setattr(checkpoint, "write", interrupt)
        assert steps(train(3)) == [2]

    def test_first_signal_wakes_and_the_second_stops_at_once(self, make_config: MakeConfig) -> None:
        trainer = make_config(5, start_paused=True).setup(local_rank=0, world_size=1)
        trainer._on_signal(signal.SIGINT, None)
        assert trainer.training_state == "training"
        with pytest.raises(KeyboardInterrupt):
            trainer._on_signal(signal.SIGINT, None)
        trainer.training_state = "completed"  # saved; leaving the viewer is no failure
        with pytest.raises(SystemExit) as leaving:
            trainer._on_signal(signal.SIGINT, None)
        assert leaving.value.code == 0

    def test_handlers_are_put_back(self, train: Train) -> None:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        train(2)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def test_interrupt_while_preparing(
        self, toy: ModuleType, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(toy.ToyPipelineConfig, "setup", interrupt)
        trainer = make_config(5).setup(local_rank=0, world_size=1)
        with pytest.raises(SystemExit) as leaving:
            trainer.setup()
        assert leaving.value.code == 130


def test_kill_while_writing_leaves_the_run_usable(
    train: Train, tmp_path: Path, start_toy: Callable[..., subprocess.Popen]
) -> None:
    process = start_toy(tmp_path, 400, "--slow-write")
    assert any(line == "writing\n" for line in process.stdout)
    process.kill()
    process.communicate(timeout=60)
    run = tmp_path / "unnamed" / "toy" / "killed"
    assert list(run.glob(".*.tmp")), "the kill came too late to test anything"
    folder = run / "nerfstudio_models"
    assert [step for step, _ in checkpoint.newest_first(folder)] == [4]
    # Nerfstudio's loader parses every name in the folder, and takes the newest.
    config = yaml.load((run / "config.yml").read_text(), Loader=yaml.Loader)
    config.load_dir = config.get_checkpoint_dir()
    assert eval_load_checkpoint(config, config.pipeline.setup())[1] == 4

    resumed = train(LAST + 1, load_dir=run, seed=7)
    whole = train(LAST + 1)
    assert same_weights(resumed, whole)


class TestResumeCommand:
    folder = Path("outputs/my run/nerfstudio_models")

    def test_holds_for_the_options_of_another_run(self, whole: F3rmTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nerfstudio takes nothing of the command line beside --load-config."""
        path = whole.base_dir / "config.yml"
        command = resume_command(["ns-train", "toy", "--load-config", str(path)], whole.checkpoint_dir)
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        config = yaml.load(path.read_text(), Loader=yaml.Loader)
        config.set_timestamp()
        assert config.resume_path() == checkpoint.make_path(whole.checkpoint_dir, LAST)

    def test_options_beside_those_of_another_run_are_refused(
        self, whole: F3rmTrainer, set_command_line: Callable[..., None]
    ) -> None:
        path = whole.base_dir / "config.yml"
        set_command_line("ns-train", "toy", "--load-config", str(path), "--max-num-iterations=9", "--data", "x")
        config = yaml.load(path.read_text(), Loader=yaml.Loader)
        with pytest.raises(ConfigError, match="--data, --max-num-iterations"):
            config.set_timestamp()
        set_command_line("ns-train", "toy", "--load-config", str(path))
        config.set_timestamp()
        assert config.get_base_dir() != whole.base_dir, "a folder of its own"
        start = checkpoint.make_path(whole.checkpoint_dir, LAST)
        config.load_dir, config.load_step = Path("elsewhere"), 4  # the run has been resumed itself
        set_command_line("ns-train", "toy", "--load-config", str(path), f"--load-checkpoint={start}")
        config.set_timestamp()
        assert config.resume_path() == start

    def test_a_step_without_a_folder_is_refused(self, make_config: MakeConfig) -> None:
        with pytest.raises(ConfigError, match="--load-dir"):
            make_config(9, load_step=4).save_config()

    def test_puts_the_option_after_the_method(self) -> None:
        argv = ["/env/bin/ns-train", "f3rm-ext", "--data", "x", "f3rm-ext-data", "--eval-mode", "all"]
        assert resume_command(argv, self.folder) == (
            "ns-train f3rm-ext --load-dir 'outputs/my run/nerfstudio_models' --data x f3rm-ext-data --eval-mode all"
        )

    @pytest.mark.parametrize(
        "old", [["--load-dir", "a"], ["--load_dir=a"], ["--load-step", "3", "--load-dir", "a"], ["--load-checkpoint=a"]]
    )
    def test_replaces_what_was_resumed_before(self, old: list[str]) -> None:
        argv = ["ns-train", "f3rm-ext", *old, "--data", "x"]
        assert resume_command(argv, Path("run")) == "ns-train f3rm-ext --load-dir run --data x"

    @pytest.mark.parametrize("argv", [[], ["python"], ["script.py", "a"], ["ns-train", "-h"]])
    def test_other_programs_get_the_option_only(self, argv: list[str]) -> None:
        assert resume_command(argv, Path("run")) == "the same command and --load-dir run"
