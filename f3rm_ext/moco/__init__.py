"""Momentum-contrast pre-training of image backbones (MoCo, He et al. 2020, arXiv 1911.05722)."""
