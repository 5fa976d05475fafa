"""Losses that draw Gaussians to the surface they depict: pure maths on tensors, apart from any trainer.

After SuGaR (Guédon and Lepetit 2024), and 2D Gaussian splatting (Huang et al. 2024) for normals from depth.
"""
