"""CrypTen as the baseline of the two-party profile: see README.md."""
