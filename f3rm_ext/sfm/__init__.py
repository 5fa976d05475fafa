"""Camera poses: from photos or a video to a capture that can be trained on."""
