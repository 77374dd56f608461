"""The words of Penstock as data: nouns, life cycles, limits, the catalogue and the rules.

Everything here is pure: no I/O, no clock, no randomness. Every other folder may import it; it imports nothing of ours.
"""
