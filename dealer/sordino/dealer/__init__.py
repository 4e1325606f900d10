"""The dealer of profile ``two-party``: makes correlated randomness, and sees no weights, shares or openings."""

import sordino.shared.grpc_settings  # noqa: F401 - before grpc is imported
