"""Writes the tables of presets in methods.md and splats.md from the presets themselves.

python docs/make_methods.py          # rewrite
python docs/make_methods.py --check  # fail if it is out of date
"""

from collections.abc import Callable, Iterable

import torch
from markdown_table import rewrite

from f3rm_ext.html.tables import Table

MIB = 2**20


def describe_field(name: str) -> dict[str, object]:
    """The column of a field."""
    from nerfstudio.data.scene_box import SceneBox

    from f3rm_ext.method_configs.presets import make_config

    config = make_config(name)
    data, model = config.pipeline.datamanager, config.pipeline.model
    box = SceneBox(torch.tensor([[-1.0] * 3, [1.0] * 3]))
    built = model.setup(scene_box=box, num_train_data=200, metadata={})
    parameters = sum(parameter.numel() for parameter in built.parameters())

    def size(grid) -> str:
        return f"{grid.num_levels} × {grid.features_per_level}, to {grid.max_res}, 2^{grid.log2_hashmap_size}"

    return {
        "extractors": ", ".join(data.features.extractors),
        "steps": f"{config.max_num_iterations:,}",
        "rays per step": data.train_num_rays_per_batch,
        "rays with features": f"{data.feature_ray_fraction:.0%}",
        "samples per ray: proposals + field": f"{[p.num_samples for p in model.proposals]} + {model.num_samples}",
        "scene grid: levels × features, finest, rows": size(model.grid),
        "feature grid": size(model.feature_grid),
        "feature samples per ray": model.feature_samples_per_ray or "all",
        "pose refinement": model.camera_optimizer.mode,
        "exposure": model.exposure,
        "depth loss": model.depth_loss_mult or "off",
        "parameters without heads": f"{parameters / 1e6:.1f} M",
        "with gradient and Adam's moments, float32": f"{16 * parameters / MIB:.0f} MiB",
    }


def describe_splats(name: str) -> dict[str, object]:
    """The column of splats."""
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    config = make_splat_config(name)
    data, model = config.pipeline.datamanager, config.pipeline.model
    return {
        "steps": f"{config.max_num_iterations:,}",
        "size of the first images": (
            f"1/{2**data.num_downscales} of each side, doubled every {data.resolution_schedule:,} steps"
        ),
        "Gaussians at first, where the capture has no points": f"{model.num_random:,}",
        "Gaussians at most": f"{model.densify.max_gaussians:,}" if model.densify.max_gaussians else "no limit",
        "too large, in extents of the scene": f"{model.densify.prune_scale3d:g}",
        "SH degree": model.sh_degree,
        "regularisation": f"{model.regularization}, {model.surface.patches:,} patches a step",
        "learning rate of the means": f"{config.optimizers['means']['optimizer'].lr:.1e}",
    }


def table(names: Iterable[str], describe: Callable[[str], dict[str, object]]) -> Table:
    """A column for each preset."""
    columns = {f"`{name}`": describe(name) for name in names}
    rows = [[label, *(str(column[label]) for column in columns.values())] for label in next(iter(columns.values()))]
    return Table(["", *columns], rows, "l" * (1 + len(columns)))


def main() -> None:
    """Rewrites the pages, or checks them."""
    from f3rm_ext.method_configs import nerf, splat

    fields, splats = lambda: table(nerf.PRESETS, describe_field), lambda: table(splat.PRESETS, describe_splats)
    rewrite({"methods.md": {"presets": fields}, "splats.md": {"presets": splats}}, "make_methods.py")


if __name__ == "__main__":
    main()
