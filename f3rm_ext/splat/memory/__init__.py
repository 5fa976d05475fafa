"""Memory savings: harmonics in half precision, packed gradients, small moments, and accounting of all of it."""
