"""The dealer of profile ``two-party``: makes correlated randomness, and sees no weights, shares or openings."""
