"""Penstock feeds work to TPUs: jobs in, capacity found, results out, nothing lost.

This file holds the version and nothing else, so that importing any part of the package costs only that
part. `ARCHITECTURE.md` says where everything is.
"""

__version__ = "0.1.0"
