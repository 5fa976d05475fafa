"""open_clip's ViT models: reads their configs, finds their weights and loads them."""

import importlib.util
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from f3rm_ext.errors import ExtractorError, reason_of
from f3rm_ext.features.extractors.parsing import close_match
from f3rm_ext.features.extractors.preprocess import RGB
from f3rm_ext.features.extractors.weights import Weights

RANDOM = "random"
"""Tag of seeded random weights, which are for tests: the features mean nothing."""
_RANDOM_SEED = 0
_SUFFIXES = {".bin", ".pt", ".pth", ".safetensors"}
_OPENAI_EXTRAS = ("input_resolution", "context_length", "vocab_size")


@dataclass(frozen=True)
class ClipModel:
    """An architecture of open_clip whose image tower is a plain ViT."""

    name: str
    """open_clip's name, e.g. ``ViT-B-16``."""
    dim: int
    """Dimension of the space shared with text."""
    patch_px: int

    @classmethod
    def from_name(cls, name: str) -> "ClipModel":
        """Reads open_clip's config of the model, without loading weights.

        Raises:
            ExtractorError: There is no such model, or its image tower has no value path.
        """
        config = _read_config(name)
        if config is None:
            import open_clip

            known = [model for model in open_clip.list_models() if model.startswith("ViT")]
            raise ExtractorError(
                f"open_clip has no model '{name}'{close_match(name, known)}: choose for instance "
                "ViT-B-16, ViT-L-14, ViT-L-14-336 or ViT-H-14."
            )
        vision = config["vision_cfg"]
        tower = None
        if "timm_model_name" in vision:
            tower = f"timm's {vision['timm_model_name']}"
        elif isinstance(vision["layers"], list):
            tower = "a ResNet"
        elif vision.get("attentional_pool"):
            tower = "a ViT with attentional pooling"
        if tower:
            raise ExtractorError(
                f"The image tower of {name} is {tower}, which has no value path to take dense features from: "
                "use a plain ViT of open_clip, e.g. ViT-B-16 or ViT-L-14-336."
            )
        return cls(name=name, dim=config["embed_dim"], patch_px=vision["patch_size"])

    def weights(self, pretrained: str) -> Weights | None:
        """Returns where the weights `pretrained` (a tag or a path) come from; None for random weights.

        Raises:
            ExtractorError: This model has no such tag.
        """
        import open_clip

        if pretrained == RANDOM:
            return None
        label = f"CLIP {self.name}"
        tag = open_clip.get_pretrained_cfg(self.name, pretrained)
        if not tag:
            if "/" in pretrained or "\\" in pretrained or Path(pretrained).suffix in _SUFFIXES:
                return Weights(model=label, option="pretrained", local=Path(pretrained).expanduser())
            tags = open_clip.list_pretrained_tags_by_model(self.name)
            raise ExtractorError(
                f"open_clip has no weights '{pretrained}' for {self.name}{close_match(pretrained, tags)}: "
                f"use {', '.join(tags) or 'another model'}, or the path of a file."
            )
        repository, _, name = tag.get("hf_hub", "").rpartition("/")
        names = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        if name:
            names = dict.fromkeys((Path(name).with_suffix(".safetensors").name, name))
        return Weights(
            model=f"{label} {pretrained}",
            option="pretrained",
            path_options=f",tag={pretrained}",
            hub_files=tuple((repository, name) for name in names) if repository else (),
            urls=(tag["url"],) if tag.get("url") else (),
        )

    def normalisation(self, pretrained: str) -> tuple[RGB, RGB]:
        """Returns the colour mean and standard deviation that the weights were trained with."""
        import open_clip

        tag = open_clip.get_pretrained_cfg(self.name, pretrained)
        mean, std = tag.get("mean", open_clip.OPENAI_DATASET_MEAN), tag.get("std", open_clip.OPENAI_DATASET_STD)
        return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def _read_config(name: str) -> dict[str, Any] | None:
    """Returns open_clip's config of a model, from its file if it comes with open_clip, which then is not imported: that
    takes seconds, and plans need no more of it. None if there is no such model."""
    spec = importlib.util.find_spec("open_clip")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).with_name("model_configs") / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text("utf-8"))
    import open_clip

    return open_clip.get_model_config(name)


def load_clip(architecture: ClipModel, pretrained: str, path: Path | None) -> Any:
    """Builds open_clip's model in float32 on the CPU, ready for inference; seeded random weights without a path.

    Weights trained with QuickGELU (OpenAI's) get it whether or not the model's name says so.

    Raises:
        ExtractorError: The file does not hold weights of this architecture.
    """
    import open_clip

    tag = open_clip.get_pretrained_cfg(architecture.name, pretrained)
    archive = _openai_archive(path) if path is not None else None
    quick_gelu = bool(tag.get("quick_gelu", False)) or archive is not None
    # Random weights are the same in every process, and the caller's random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_RANDOM_SEED)
        try:
            # Without pretrained_hf=False the text tower's own weights would be fetched, only to be overwritten.
            model: Any = open_clip.create_model(architecture.name, force_quick_gelu=quick_gelu, pretrained_hf=False)
        except OSError as error:
            raise ExtractorError(
                f"The text tower of {architecture.name} cannot be set up ({reason_of(error)}): "
                "use a model with open_clip's own text tower, e.g. ViT-L-14-336."
            ) from error
    if path is not None:
        try:
            if archive is not None:
                model.load_state_dict(archive)
            else:
                open_clip.load_checkpoint(model, str(path))
        except Exception as error:
            raise ExtractorError(
                f"The file {path} does not hold weights of {architecture.name} ({' '.join(str(error).split())[:160]}): "
                "check model= and pretrained=."
            ) from error
    return model.eval().requires_grad_(False)


def _openai_archive(path: Path) -> dict[str, torch.Tensor] | None:
    """Returns the state dict of a TorchScript archive, in which OpenAI published CLIP; None for other files."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        if not any("/code/" in name for name in archive.namelist()):
            return None
    state = torch.jit.load(path, map_location="cpu").state_dict()
    return {name: tensor for name, tensor in state.items() if name not in _OPENAI_EXTRAS}
