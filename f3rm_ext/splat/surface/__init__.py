"""Losses that pull Gaussians to the surfaces they depict: pure maths on tensors, independent of any trainer.

They follow SuGaR (Guédon and Lepetit 2024), and 2D Gaussian splatting (Huang et al. 2024) for normals from depth.
"""
