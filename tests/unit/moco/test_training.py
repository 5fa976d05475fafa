"""Steps of a training: what changes once per step, going on, gradient checkpointing, and what is refused."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.engine import checkpoint
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.moco.encoder import Backbone, Encoder
from f3rm_ext.moco.options import TrainConfig, make_plan
from f3rm_ext.moco.run import TrainingRun
from f3rm_ext.moco.training import Training

CPU = torch.device("cpu")


def config(**options: Any) -> TrainConfig:
    given = {"batch_size": 4, "epochs": 4, "image_size": 32, **options}
    return TrainConfig(data=Path("data"), output=Path("out"), **given)


def batches(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        one, two = (torch.randn(4, 3, 32, 32, generator=generator) for _ in range(2))
        yield one, two, torch.randperm(20, generator=generator)[:4]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_queue_and_key_encoder_change_once_per_step_of_two_batches() -> None:
    training = Training(make_plan(config(gradient_accumulation_steps=2, queue_size=16, momentum=0.75), 20), "a", CPU)
    source = batches()
    training.train_step(source)  # the first leaves the key encoder, which is still the same network
    before = {name: value.clone() for name, value in training.key.named_parameters()}
    query = {name: value.detach().clone() for name, value in training.query.named_parameters()}
    result = training.train_step(source)
    assert training.queue is not None and len(training.queue) == 16 and training.first_batch == 4
    for name, value in training.key.named_parameters():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * query[name])
        assert value.grad is None
    assert set(result.scalars()) == {"loss", "pretext_accuracy", "output_spread", "alignment", "uniformity"}


@pytest.mark.parametrize("algorithm", ["v2", "v3"])
def test_a_restored_training_takes_the_same_step(algorithm: Any) -> None:
    plan = make_plan(config(algorithm=algorithm), 20)
    training, source = Training(plan, "a", CPU), batches()
    training.train_step(source)
    file = io.BytesIO()
    torch.save(training.state(), file)
    file.seek(0)
    other = Training(plan, "a", CPU)
    assert other.restore(torch.load(file, weights_only=True)) == []
    third = next(source)
    losses = [run.train_step(iter([third])).loss for run in (training, other)]
    assert torch.equal(*losses) and training.step == other.step == 2
    assert same(training.query.state_dict(), other.query.state_dict())
    assert same(training.state()["queue"], other.state()["queue"])


def test_what_differs_on_resume_is_said() -> None:
    training = Training(make_plan(config(), 20), "a", CPU)
    training.train_step(batches())
    state = training.state()
    shorter = Training(make_plan(config(queue_size=3), 20), "a", CPU)
    assert "queue size 16 → 3" in " ".join(shorter.restore(state))
    assert shorter.queue is not None and len(shorter.queue) == 3
    decayed = Training(make_plan(config(weight_decay=0.05), 20), "a", CPU)
    assert "weight decay" in " ".join(decayed.restore(state))
    assert decayed.optimizer.param_groups[0]["weight_decay"] == 0.05
    elsewhere = Training(make_plan(config(), 20), "b", CPU)
    assert elsewhere.restore(state) and elsewhere.queue is not None and len(elsewhere.queue) == 0
    for option, before in (({"algorithm": "v3"}, "--algorithm v2"), ({"optimizer": "adamw"}, "--optimizer sgd")):
        with pytest.raises(CheckpointError, match=before):
            Training(make_plan(config(**option), 20), "a", CPU).restore(state)


def test_steps_of_another_size_count_for_the_part_that_is_done() -> None:
    training = Training(make_plan(config(), 20), "a", CPU)
    for _ in range(6):
        training.train_step(batches())
    state = training.state()
    for accumulation, steps in ((1, 6), (2, 3), (4, 1)):
        other = Training(make_plan(config(gradient_accumulation_steps=accumulation), 20), "a", CPU)
        other.restore(state)
        assert other.step == steps


def test_a_finished_training_takes_no_other_options_or_pictures() -> None:
    plan = make_plan(config(epochs=1), 20)
    training = Training(plan, "a", CPU)
    while training.step < plan.steps:
        training.train_step(batches())
    state = training.state()
    assert Training(plan, "a", CPU).restore(state) == []
    for other, pictures in ((config(epochs=1, temperature=0.5), "a"), (config(epochs=1), "b")):
        with pytest.raises(CheckpointError, match="--epochs"):
            Training(make_plan(other, 20), pictures, CPU).restore(state)
    assert Training(make_plan(config(epochs=9), 20), "a", CPU).restore(state), "more passes go on"


def test_gradient_checkpointing_changes_neither_gradients_nor_statistics() -> None:
    torch.manual_seed(0)
    plain = Encoder("resnet18", "v2")
    saving = Encoder("resnet18", "v2", use_grad_checkpointing=True)
    saving.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    for encoder in (plain, saving):
        encoder(images)[:, 0].sum().backward()
    for one, two in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    for (name, one), (_, two) in zip(plain.named_buffers(), saving.named_buffers(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_backbone_has_the_names_and_values_of_torchvision() -> None:
    from torchvision.models import resnet18

    network, backbone = resnet18(weights=None).eval(), Backbone("resnet18").eval()
    missing = network.load_state_dict(backbone.state_dict(), strict=False)
    assert missing.missing_keys == ["fc.weight", "fc.bias"] and not missing.unexpected_keys
    network.fc = torch.nn.Identity()  # type: ignore
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(backbone(images), network(images))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": None}, r"batch of 64.*--batch-size 20"),
        ({"gradient_accumulation_steps": 100}, "--epochs"),
        ({"algorithm": "v3", "queue_size": 8}, "--queue-size"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"architecture": "vit_small", "image_size": 70}, "use 64"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(config(**options), 20)


def test_no_batch_is_advised_that_would_be_refused() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(config(batch_size=None), 1)
    assert "--batch-size" not in str(error.value)


@pytest.mark.parametrize("save_every", [1, 500])
def test_a_training_that_diverges_leaves_checkpoints_that_can_be_resumed(
    save_every: int, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Training.train_step

    def diverge(training: Training, source: Iterator[Any]) -> Any:
        result = train_step(training, source)
        if training.step == 2:
            training.query.backbone.conv1.weight.data.fill_(torch.nan)  # type: ignore[union-attr, operator]
        return result

    monkeypatch.setattr(Training, "train_step", diverge)
    given = replace(config(save_every=save_every, device="cpu"), data=pictures, output=tmp_path)
    with pytest.raises(ConfigError, match="--learning-rate") as error:
        TrainingRun(given).main()
    saved = checkpoint.newest_first(tmp_path / "checkpoints")
    assert bool(saved) == (save_every == 1) == ("--resume" in str(error.value))
    for _, path in saved:
        assert all(value.isfinite().all() for value in checkpoint.load(path, needed=())["query"].values())


@pytest.mark.parametrize(
    ("options", "images", "advised"),
    [({}, 2800, True), ({}, 10_000, False), ({"algorithm": "v3"}, 2800, False), ({"resume": True}, 2800, False)],
)
def test_v3_is_advised_where_pictures_are_few(options: dict[str, Any], images: int, advised: bool) -> None:
    assert "queue (50)" in " ".join(make_plan(config(queue_size=50), 20).warnings())
    assert ("--algorithm v3" in " ".join(make_plan(config(**options), images).warnings())) == advised


def test_presets_fill_what_is_not_given() -> None:
    plan = make_plan(config(preset="optimized-16gb", batch_size=None, epochs=7), 2000)
    assert (plan.pair.batch_size, plan.pair.queue_size, plan.pair.epochs, plan.accumulation) == (96, 76_800, 7, 4)
    assert plan.config.use_amp is True
    lines = " ".join(plan.announcement())
    assert "batch: 384" in lines and "AMP: True" in lines and "800.0 batches" in lines


def test_amp_changes_the_loss_little() -> None:
    found = []
    for use_amp in (False, True):
        training = Training(make_plan(config(use_amp=use_amp, algorithm="v3"), 20), "a", CPU)
        found.append(training.train_step(batches()))
    plain, reduced = found
    assert reduced.loss.item() == pytest.approx(plain.loss.item(), rel=0.1) and reduced.key.dtype == torch.float32
    assert not torch.equal(plain.key, reduced.key)


def test_rate_rises_in_the_warm_up_and_falls_along_a_cosine() -> None:
    training = Training(make_plan(config(algorithm="v3", epochs=10, warmup_epochs=2, learning_rate=1.0), 20), "a", CPU)
    rates = []
    for step in range(training.plan.steps):  # 5 steps per pass
        training.step = step
        rates.append(training.learning_rate)
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and rates[9] == rates[10] == 1
    assert rates[30] == pytest.approx(0.5) and rates[49] < 0.01
    defaults = make_plan(config(algorithm="v3", epochs=10), 20)
    assert (defaults.optimizer, defaults.weight_decay, defaults.warmup_steps) == ("lars", 1e-6, 5)
    assert make_plan(config(), 20).warmup_steps == 0


def test_statistics_of_the_key_encoder_follow_like_its_parameters() -> None:
    training = Training(make_plan(config(momentum=0.5), 20), "a", CPU)
    source = batches()
    training.train_step(source)
    name = "backbone.bn1.running_mean"
    for weight in (0.5, 0.5):  # after the first step: mean of all, then the momentum
        before, query = (encoder.state_dict()[name].clone() for encoder in (training.key, training.query))
        training.train_step(source)
        torch.testing.assert_close(training.key.state_dict()[name], weight * before + (1 - weight) * query)
    images = next(source)[0]
    with torch.no_grad():
        torch.testing.assert_close(training.key(images)[:2], training.key(images[:2]))  # whatever else is in the batch
    assert not Training(make_plan(config(), 20), "a", CPU).key.training
    assert Training(make_plan(config(algorithm="v3"), 20), "a", CPU).key.training


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("batch_negatives", [True, False])
def test_a_step_is_the_mean_of_its_batches_and_keys_are_negatives_of_their_own_batch_alone(
    batch_negatives: bool, accumulated: int
) -> None:
    options = {"batch_negatives": batch_negatives, "gradient_accumulation_steps": accumulated}
    plan = make_plan(config(mask_same_image=False, **options), 20)
    training = Training(plan, "a", CPU)
    given = [batch for batch, _ in zip(batches(), range(accumulated), strict=False)]
    queries = [training.query(one) for one, _, _ in given]
    training.key.load_state_dict(training.query.state_dict())  # as it is in the first step, when the queue is empty
    keys = [training.key(two) for _, two, _ in given]
    scores = torch.stack([query @ key.T / plan.temperature for query, key in zip(queries, keys, strict=True)])
    hits = (scores.argmax(dim=2) == torch.arange(4)).float().mean() if batch_negatives else torch.ones(())
    wanted = 0 * scores.sum()
    if batch_negatives:
        wanted = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.arange(4).repeat(accumulated))
    slopes = torch.autograd.grad(wanted, list(training.query.parameters()))
    result = training.train_step(iter(given))
    torch.testing.assert_close(result.loss, wanted.detach(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(result.accuracy, hits)
    for parameter, slope in zip(training.query.parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, atol=1e-3, rtol=1e-2)
    assert training.queue is not None
    held, ids = training.queue.negatives()
    torch.testing.assert_close(held, torch.cat(keys), atol=1e-5, rtol=1e-4)
    assert torch.equal(ids, torch.cat([numbers for _, _, numbers in given]))
