"""The ledger: what runs have cost and reached, measured alike, and whether a change was for the better."""
