"""A plan as text: tables, a bar of the card's memory, and sentences."""

from collections.abc import Iterator
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from f3rm_ext.html.page import duration
from f3rm_ext.memory.devices import GIB
from f3rm_ext.memory.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.planning.advice import sum_peak
from f3rm_ext.planning.gaussians import count_parts
from f3rm_ext.planning.plan import RAYS_OPTION, Plan
from f3rm_ext.planning.question import methods
from f3rm_ext.profiling.memory import MIB

NAMES: dict[Category, tuple[str, str]] = {
    "parameters": ("P", "parameters"),
    "gradients": ("G", "gradients"),
    "optimizer": ("O", "optimiser's moments"),
    "buffers": ("B", "buffers and statistics"),
    "images": ("I", "cached images"),
    "features": ("F", "cached features"),
    "activations": ("A", "activations, kept for the backward pass"),
    "workspace": ("W", "workspace of a step"),
    "context": ("C", "context and libraries"),
    "fragmentation": ("X", "allowance for fragmentation"),
}
"""Letter in the bar, and description."""
BAR = 60
"""Length of the bar, characters."""


def show(plan: Plan) -> RenderableType:
    """Returns a plan for rich's console."""
    parts: list[RenderableType] = [
        Text(heading(plan), style="bold"),
        memory_table(plan.estimate),
        Text(bar(plan.estimate, plan.request.device.memory_bytes)),
        Text(),
        *(Text(line) for line in sentences(plan)),
    ]
    if plan.advice.savings:
        parts += [Text(), advice_table(plan)]
    parts += [Text(), *(Text(line) for line in verdict(plan))]
    return Group(*parts)


def heading(plan: Plan) -> str:
    """Returns the method and the device, in one line."""
    device, count = plan.request.device, plan.request.processes
    name = device.name or "a card"
    bandwidth = device.bandwidth_gb_s
    speed = "" if bandwidth is None else f", {bandwidth} GB/s"
    times = f"{count} × " if count > 1 else ""
    return f"{plan.question.method} on {times}{name} ({device.memory_bytes / GIB:.4g} GiB{speed})"


def memory_table(estimate: MemoryEstimate) -> Table:
    """Returns memory by category and phase, MiB."""
    phases = [phase for phase in get_args(Phase) if phase in estimate.device]
    titles = {
        "train": "training step",
        "evaluation": "evaluation picture",
        "lifting": "lifting of features",
        "query": "viewer query",
    }
    table = Table(title="Memory, MiB", title_justify="left")
    columns = [estimate.device[phase] for phase in phases]
    has_host = any(estimate.host.values())
    table.add_column("")
    table.add_column("of each device" if has_host else "")
    for phase in phases:
        table.add_column(titles[phase], justify="right")
    if has_host:
        columns.append(estimate.host)
        table.add_column("main memory", justify="right")
    for category, (letter, name) in NAMES.items():
        values = [column.get(category, 0) for column in columns]
        if any(values):
            table.add_row(letter, name, *(f"{value / MIB:,.0f}" if value else "" for value in values))
    table.add_section()
    table.add_row("", "peak", *(f"{sum(column.values()) / MIB:,.0f}" for column in columns))
    return table


def bar(estimate: MemoryEstimate, memory_bytes: int) -> str:
    """Returns the memory of a training step to the scale of the card's, a letter per category."""
    peak = estimate.peak("train")
    scale = max(peak, memory_bytes)
    drawn, total = "", 0
    for category, (letter, _) in NAMES.items():
        total += estimate.device["train"].get(category, 0)
        drawn += letter * (round(BAR * total / scale) - len(drawn))
    end = round(BAR * memory_bytes / scale)
    picture = f"{drawn[:end]:·<{end}}┃{drawn[end:]}"
    return f"{picture} {peak / GIB:.2f} of {memory_bytes / GIB:.4g} GiB, {peak / memory_bytes:.0%}"


def sentences(plan: Plan) -> Iterator[str]:
    """Yields images, growth, steps and time, a line each."""
    coverage = plan.coverage
    yield f"Images: {plan.sizes.source}."
    yield f"Cache: {_cached_images(plan)}"
    if plan.growth is not None:
        growth, parts = plan.growth, count_parts(plan.request)
        grown = f"{growth.first:,} at the start, {growth.last:,} at the end" * (growth.last != growth.first)
        grown = f"Gaussians: {grown or f'{growth.first:,}'} ({growth.source})"
        grown += f", {-(-growth.last // parts):,} on each device." if parts > 1 else "."
        if growth.end > growth.begin:
            grown += f" They are added every {growth.every} steps from {growth.begin:,} to {growth.end:,}."
        yield grown
    if coverage.images_per_step:
        per_step = f"{coverage.images_per_step} image" + "s" * (coverage.images_per_step > 1)
    else:
        per_step = f"{coverage.rays_per_step:,.0f} rays"
        if plan.request.processes > 1:
            per_step += f" over all devices, {coverage.rays_per_step_device:,.0f} on each"
    yield (
        f"Steps: {coverage.steps:,} of {per_step}: {coverage.epochs:.3g} epochs of {coverage.pixels / 1e6:,.1f} M "
        f"pixels, with {coverage.steps_per_epoch:,.0f} steps each."
    )
    if plan.wanted_epochs is not None:
        steps = coverage.epochs_to_steps(plan.wanted_epochs)
        yield f"For {plan.wanted_epochs:g} epochs: --max-num-iterations {steps}."
    yield from _learning_rates(plan)
    yield from _cycles(plan)
    speed = plan.throughput
    if speed is None:
        yield "Time: unknown; --probe measures a few steps on this machine and extrapolates."
    else:
        least = "at least " if plan.growth is not None and plan.growth.last > plan.growth.first else ""
        yield (
            f"Time: {least}{duration(speed.duration_s(coverage.steps))} at {speed.steps_per_s:.3g} steps per second, "
            f"{speed.source}; evaluation and saving not included."
        )


def _learning_rates(plan: Plan) -> Iterator[str]:
    """Yields the usual learning rates for a field whose batch differs from its method's; none if they were set."""
    config, own = plan.request.config, methods()[plan.question.method]
    batch = getattr(own.pipeline.datamanager, "train_num_rays_per_batch", None)
    ratio = plan.coverage.rays_per_step / batch if batch and not plan.coverage.images_per_step else 1.0
    rates = {
        name: (parts["optimizer"].lr, own.optimizers[name]["optimizer"].lr)
        for name, parts in config.optimizers.items()
        if name in own.optimizers and name != "camera_opt"
    }
    if abs(ratio - 1) < 0.01 or any(now != before for now, before in rates.values()):
        return
    options = " ".join(
        f"--optimizers.{name.replace('_', '-')}.optimizer.lr {before * ratio**0.5:.2g}"
        for name, (_, before) in rates.items()
    )
    yield f"Learning rates: for {ratio:.3g} times the method's batch, the square-root rule for Adam gives {options}."


def _cached_images(plan: Plan) -> str:
    """Returns where images and features are."""
    here = "in main memory" if plan.request.device.type == "cpu" else "on each device"
    places = [(here, plan.estimate.device["train"]), ("in main memory", plan.estimate.host)]
    parts = [
        f"{held[category] / MIB:,.0f} MiB of {category} {where}"
        for where, held in places
        for category in ("images", "features")
        if held.get(category)
    ]
    return ", ".join(parts) + "."


def _cycles(plan: Plan) -> Iterator[str]:
    coverage = plan.coverage
    if coverage.repeat_for_one_pass is None:
        part = f"1 of {coverage.pixel_stride**2} pixels of " if coverage.pixel_stride > 1 else ""
        yield f"Coverage: {part}all {coverage.images} training images stay in memory."
        return
    times = f"{coverage.appearances_min}" + (
        f" or {coverage.appearances_max}" if coverage.appearances_max > coverage.appearances_min else ""
    )
    yield (
        f"Coverage: {coverage.windows} windows of {coverage.window} images on each device, with every image in {times} "
        f"of them; {coverage.coverage:.0%} of the images are used."
    )
    if coverage.repeat is None:
        yield "The other images are never used: give --pipeline.datamanager.train-num-times-to-repeat-images."
    elif coverage.appearances_max <= 1:
        yield (
            "Every image is in at most one window, so it is seen in one block and then forgotten: a smaller "
            "--pipeline.datamanager.train-num-times-to-repeat-images shows each image repeatedly."
        )
    else:
        yield (
            f"A single pass would take --pipeline.datamanager.train-num-times-to-repeat-images "
            f"{coverage.repeat_for_one_pass}, but images seen in one block are forgotten: many passes are better."
        )


def advice_table(plan: Plan) -> Table:
    """Returns the advised memory options, each with its saving."""
    table = Table(title="Options that lower memory, the least harmful first", title_justify="left")
    for column in ("option", "now", "impact", "lowers the peak of", "saves, MiB"):
        table.add_column(column, justify="right" if column.startswith("saves") else "left", overflow="fold")
    for saving in plan.advice.savings:
        options = " ".join(f"--{name} {value}" for name, value in saving.options)
        impact = saving.quality_impact.description
        table.add_row(options, saving.now, impact, saving.peak, f"{saving.saved_bytes / MIB:,.0f}")
    return table


def verdict(plan: Plan) -> Iterator[str]:
    """Yields whether it fits, what would still fit, and the command."""
    device, advice = plan.request.device, plan.advice
    memory, usable = f"{device.memory_bytes / GIB:.4g} GiB", device.usable_bytes
    if usable < device.memory_bytes:
        memory = f"the {usable / GIB:.2f} GiB that a plan may use of {memory}"
    peak, picture = sum_peak(advice.estimate, "training"), sum_peak(advice.estimate, "pictures")
    if plan.fits:
        yield f"It fits, with {(usable - max(peak, picture)) / GIB:.2f} GiB to spare."
    elif not advice.fits:
        yield (
            f"It does not fit{', even with these options' if advice.savings else ', and no option changes that'}: "
            f"training takes {peak / GIB:.2f} of {memory}. Use a smaller preset, smaller images or fewer Gaussians."
        )
    elif advice.savings:
        pictures = f" and pictures {picture / GIB:.2f}" if picture and advice.pictures_fit else ""
        yield f"It does not fit as it is. With these options training takes {peak / GIB:.2f}{pictures} of {memory}:"
    else:
        yield f"Training fits, with {(usable - peak) / GIB:.2f} GiB to spare."
    if advice.fits and not advice.pictures_fit:
        what, way = "evaluation", "with --vis viewer, which evaluates nothing"
        if "query" in advice.estimate.device and advice.estimate.peak("query") > usable:
            what += " and of the viewer"
            way = "without pictures (--vis tensorboard --steps-per-eval-image 0 --steps-per-eval-all-images 0)"
        yield (
            f"Pictures of {what} take {picture / GIB:.2f} of {memory}, and no option lowers this enough: train {way}."
        )
    if "lifting" in advice.estimate.device and (lifting := advice.estimate.peak("lifting")) > usable:
        yield (
            f"Lifting features after the last step takes {lifting / GIB:.2f} of {memory}: they are left out, and "
            "`f3rm-ext features lift` lifts them afterwards, without the optimisers' moments."
        )
    if plan.most is not None:
        name, value = plan.most
        what, option = ("rays per step", f" (--{name} {value})") if name == RAYS_OPTION else ("Gaussians", "")
        number = f"at most {value:,} {what}{option} fit" if value else f"no number of {what} fits"
        yield f"With all other options unchanged, {number}."
    yield plan.command
