"""Weights from files: released checkpoints and our own, and a dense model from a sparse one."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from f3rm_ext.errors import CheckpointError, ExtractorError
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import explain_misfit, load_state_dict
from f3rm_ext.sfm.diffusion.dense_head import UPSAMPLING
from f3rm_ext.sfm.diffusion.model import IMAGE_SIDE_PX, ModelSize, RayDiffuser, Stage

HEAD_CHANNELS = 72
"""Channels of an attention head in the published model; our sizes have 64."""
_ENCODER = "encoder.vit."
_RELEASED = (
    (r"^feature_extractor\.model\.", _ENCODER),
    (r"^scratch\.input_conv\.", "rays."),
    (r"^ray_predictor\.x_embedder\.proj\.", "transformer.input."),
    (r"^ray_predictor\.t_embedder\.mlp\.", "transformer.step."),
    (r"^ray_predictor\.blocks\.(\d+)\.attn\.", r"transformer.blocks.\1.attention."),
    (r"^ray_predictor\.blocks\.(\d+)\.mlp\.fc1\.", r"transformer.blocks.\1.mlp.0."),
    (r"^ray_predictor\.blocks\.(\d+)\.mlp\.fc2\.", r"transformer.blocks.\1.mlp.2."),
    (r"^ray_predictor\.blocks\.(\d+)\.adaLN_modulation\.1\.", r"transformer.blocks.\1.modulation."),
    (r"^ray_predictor\.final_layer\.linear\.", "transformer.output.linear."),
    (r"^ray_predictor\.final_layer\.adaLN_modulation\.1\.", "transformer.output.modulation."),
    (r"^project_opers\.(\d)\.project\.0\.", r"head.readouts.\1.0."),
    (r"^scratch\.layer(\d)_rn\.", r"head.inputs.#\1."),
    (r"^scratch\.refinenet(\d)\.out_conv\.", r"head.fusions.#\1.output."),
    (r"^scratch\.refinenet(\d)\.resConfUnit1\.", r"head.fusions.#\1.lateral."),
    (r"^scratch\.refinenet(\d)\.resConfUnit2\.", r"head.fusions.#\1.refine."),
    (r"\.t_embedder\.mlp\.(\d)\.", r".step.\1."),
    (r"\.adaLN_modulation\.1\.", ".modulation."),
    (r"^scratch\.output_conv\.", "head.output."),
)
"""Names of the released checkpoints, in order of replacement. `#` stands for a number that counts from 1."""
_IGNORED = re.compile(r"^noise_scheduler\.|^ray_predictor\.x_pos_enc\.|\.mask_token$")
"""Keys of the released files that are no weights: the schedule and the codes of numbers, which are computed."""


def to_our_names(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the parameters of a released checkpoint; ours keep their names.

    1 × 1 convolutions and linear layers, which the released code uses differently, get our shapes.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in released.items():
        if _IGNORED.search(name):
            continue
        ours = name
        for pattern, replacement in _RELEASED:
            ours = re.sub(pattern, replacement, ours)
        ours = re.sub(r"#(\d)", lambda match: str(int(match[1]) - 1), ours)
        if ours == "transformer.input.weight" and tensor.ndim == 4:
            state[ours] = tensor.flatten(1)
        elif ours == "rays.weight" and tensor.ndim == 2:
            state[ours] = tensor[:, :, None, None]
        else:
            state[ours] = tensor
    return state


def model_size(state: Mapping[str, Tensor]) -> tuple[ModelSize, Stage]:
    """Tells the size and the stage of a model from its weights, by our names. Raises CheckpointError if these are no
    weights of DiffusionSfM."""
    try:
        width = state["transformer.input.weight"].shape[0]
        depth = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("transformer.blocks."))
        stage: Stage = "dense" if "head.output.0.weight" in state else "sparse"
        head_width = state["head.output.0.weight"].shape[1] if stage == "dense" else 4 * HEAD_CHANNELS
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            "The file holds no weights of DiffusionSfM: give a checkpoint of `f3rm-ext sfm train` or a released one."
        ) from error
    # No tensor has the number of heads in its shape.
    heads = width // HEAD_CHANNELS if width % HEAD_CHANNELS == 0 else width // 64
    return ModelSize(width, depth, heads, head_width), stage


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads the weights of a checkpoint, released or ours, by our names. Nothing but tensors is unpickled. Raises
    CheckpointError if there is no such file, or it is damaged."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}: check the path.")
    try:
        return to_our_names(load_state_dict(path))
    except ExtractorError as error:
        raise CheckpointError(str(error)) from error


def image_side_px(path: Path) -> int:
    """Returns the side of the images that a checkpoint was trained on; released ones do not tell it."""
    if path.suffix == ".safetensors":
        return IMAGE_SIDE_PX
    content = torch.load(path, map_location="cpu", weights_only=True)
    settings = content.get("settings", {}) if isinstance(content, Mapping) else {}
    return int(settings.get("dataset.image_size", IMAGE_SIDE_PX))


def build_model(state: Mapping[str, Tensor]) -> RayDiffuser:
    """Builds the model that these weights belong to. Raises CheckpointError if parameters are missing, unknown or of
    other shapes."""
    size, stage = model_size(state)
    encoder = {name.removeprefix(_ENCODER): tensor for name, tensor in state.items() if name.startswith(_ENCODER)}
    if not encoder:
        raise CheckpointError("The checkpoint has no image encoder: give the weights of DINOv2 ViT-S/14, too.")
    try:
        vit = VisionTransformer.from_state_dict(encoder)
    except ExtractorError as error:
        raise CheckpointError(f"The image encoder in the checkpoint cannot be used: {error}") from error
    with torch.device("meta"):
        model = RayDiffuser(vit, size, stage, residual="residual" in state)
    model.encoder.vit = vit
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(_ENCODER)}
    load_exactly(model, {**{_ENCODER + name: tensor for name, tensor in vit.state_dict().items()}, **rest})
    return model


def load_exactly(model: RayDiffuser, state: Mapping[str, Tensor]) -> None:
    """Gives a model these weights. Raises CheckpointError if they are those of another one."""
    expected = model.state_dict()
    if misfit := explain_misfit(expected, state):
        raise CheckpointError(f"The weights of the checkpoint {misfit}: it belongs to another model or version.")
    model.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in state.items()}, assign=True)


def dense_from_sparse(dense: RayDiffuser, sparse: Mapping[str, Tensor]) -> None:
    """Gives a dense model the encoder and the transformer of a sparse one.

    The linear layer of the rays becomes a convolution. That of a model with a residual head applies it to one cell in
    the middle of each patch, whose noise is as strong as the sparse model knows it: the model begins with the upsampled
    prediction of the sparse one. Otherwise it applies it to the mean of a patch's cells, as published. The head keeps
    its initial weights.

    Raises:
        CheckpointError: the weights are those of a dense model, or of another size.
    """
    size, stage = model_size(sparse)
    if stage != "sparse":
        raise CheckpointError(
            "The checkpoint is that of a dense model, but a dense model begins with a sparse one: give a sparse "
            "checkpoint, or resume the dense run."
        )
    if (size.width, size.depth) != (dense.size.width, dense.size.depth):
        raise CheckpointError(
            f"The checkpoint has {size.depth} blocks of width {size.width}, but the model {dense.size.depth} of width "
            f"{dense.size.width}: choose the same size."
        )
    linear = sparse["rays.weight"]
    if dense.residual is None:
        weight = linear.repeat(1, 1, UPSAMPLING, UPSAMPLING) / UPSAMPLING**2
    else:
        weight = linear.new_zeros(*linear.shape[:2], UPSAMPLING, UPSAMPLING)
        weight[:, :, UPSAMPLING // 2, UPSAMPLING // 2] = linear[:, :, 0, 0]
    own = {name: tensor for name, tensor in dense.state_dict().items() if name.startswith(("head.", "residual"))}
    load_exactly(dense, {**own, **sparse, "rays.weight": weight})
