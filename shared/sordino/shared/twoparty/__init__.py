"""Profile ``two-party``, what both parties do: arithmetic on additive shares (docs/two-party.md)."""
