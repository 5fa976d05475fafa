"""The ledger of runs: speed, memory and quality, measured alike, and comparisons with a baseline."""
