"""Settings, and the only place that picks adapters and builds processes.

Commands import from here when they run.
"""
