"""Decides: one snapshot and a time in, one plan out. Pure and deterministic; it never fetches and never performs."""
