"""Memory savings: harmonics in half precision, packed gradients, and small moments."""
