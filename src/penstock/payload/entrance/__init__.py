"""The folder that is put on PYTHONPATH for the processes of a gang; see `sitecustomize` in it."""
