"""What a trained scene is written as for other programs. Knows models by protocol only."""
