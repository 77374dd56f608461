"""Google's APIs on the wire, on 127.0.0.1, for tests and for people without a cloud: Cloud TPU, Cloud Storage.

`facts.toml` says of each behaviour where it is known from.
"""
