"""The trained backbone as a file: safetensors with its description, and a model card beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from f3rm_ext import __version__
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN as MEAN
from f3rm_ext.features.extractors.preprocess import IMAGENET_STD as STD
from f3rm_ext.moco.encoder import Backbone, is_vit
from f3rm_ext.moco.vit import WIDTHS, VitBackbone
from f3rm_ext.utils.atomic_files import write_atomic

WEIGHTS, CARD = "backbone.safetensors", "README.md"


def export(backbone: Backbone | VitBackbone, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Writes the backbone without classifier, with the parameter names of torchvision, or of timm for ViTs.

    Args:
        facts: Plain values that describe the training, among them ``architecture``, ``image_size`` and ``step``.
    """
    from safetensors.torch import save

    state: dict[str, Tensor] = {
        name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()
    }
    metadata = {
        "format": "pt",
        "made_by": f"f3rm-ext moco {__version__}",
        "mean": str(MEAN),
        "std": str(STD),
    }
    metadata |= {name: str(value) for name, value in facts.items()}
    try:
        write_atomic(folder / WEIGHTS, save(state, metadata))
        write_atomic(folder / CARD, _card(facts).encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(
            f"The weights cannot be written to {folder} ({error.strerror or error}): free space, then use --resume."
        ) from error
    return folder / WEIGHTS


def _card(facts: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in facts.items())
    vit = is_vit(facts["architecture"])
    if vit:
        heads, size = WIDTHS[facts["architecture"]] // 64, facts["image_size"]
        code = f"""from timm import create_model

network = create_model("{facts["architecture"]}_patch16_224", img_size={size}, num_heads={heads}, num_classes=0)
network.load_state_dict(load_file("{WEIGHTS}"))"""
    else:
        code = f"""from torchvision.models import get_model

network = get_model("{facts["architecture"]}", weights=None)
network.load_state_dict(load_file("{WEIGHTS}"), strict=False)  # all but fc"""
    return f"""# {facts["architecture"]} pre-trained without labels

MoCo {facts["algorithm"]} by f3rm-ext {__version__}. The backbone is in `{WEIGHTS}`, without classifier, with the
parameter names of {"timm" if vit else "torchvision"}. Input: RGB from 0 to 1, minus {MEAN}, over {STD}.
Its features were not evaluated by this training: compare them with those of random weights and of ImageNet weights
before use.

| | |
|---|---|
{rows}

```python
from safetensors.torch import load_file
{code}
```
"""
