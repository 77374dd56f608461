"""Providers of slices behind `ports.capacity`; `fake` is the scriptable one for tests and the simulator."""
