"""Buckets and directories behind `ports.objects`; `memory` is the one for tests and the simulator."""
