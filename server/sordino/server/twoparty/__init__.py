"""Profile ``two-party``, what the server alone does (docs/two-party.md)."""
