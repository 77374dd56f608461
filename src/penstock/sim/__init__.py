"""The simulator: virtual time, a fake world with faults, agents as small models, the production controller.

Built by `wiring` for `tpu sim`; nothing else of Penstock may import it.
"""
