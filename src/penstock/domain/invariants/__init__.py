"""The rules S1-S22 and L1-L12 as functions over a history; see `rules` for the registry and `history` for the input."""
