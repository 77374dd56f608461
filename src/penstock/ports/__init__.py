"""What the controller needs of the outside, in domain verbs: Protocols, their results and their errors.

Adapters live elsewhere under the same file name (store, capacity, objects, clock). Nothing here performs anything.
"""
