"""Profile ``two-party``, what the client alone does (docs/two-party.md)."""
