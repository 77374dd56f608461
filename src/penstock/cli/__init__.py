"""The `tpu` command: one module per command, loaded when it is called.

`main.py` is the entry point and names the commands. A command prints and parses; it decides nothing about
jobs, and reaches the parts that run something (simulator, store, controller) only through
`penstock.wiring`, imported inside the function that needs it.
"""
