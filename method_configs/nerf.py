"""The methods `f3rm-ext`, `f3rm-ext-lite` and `f3rm-ext-big`: one factory, three presets."""

from f3rm_ext.method_configs.guarded import guarded_method, prepare_command

PRESETS = {
    "f3rm-ext": "CLIP features distilled into a radiance field.",
    "f3rm-ext-lite": "A small feature field for the CPU and for small GPUs.",
    "f3rm-ext-big": "CLIP and DINOv2 features together, at higher resolution; for large GPUs.",
}

prepare_command()

f3rm_ext = guarded_method("f3rm-ext", PRESETS["f3rm-ext"])
f3rm_ext_lite = guarded_method("f3rm-ext-lite", PRESETS["f3rm-ext-lite"])
f3rm_ext_big = guarded_method("f3rm-ext-big", PRESETS["f3rm-ext-big"])
