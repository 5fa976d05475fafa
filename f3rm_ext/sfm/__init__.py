"""Camera poses: from photos or a video to a capture, measures of poses, rays, and DiffusionSfM."""
