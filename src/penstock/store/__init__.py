"""The store on SQLite and PostgreSQL: one schema, SQL written once, one writer at a time.

`sqlite.py` and `postgres.py` are the two ways in; wiring and the simulator call them. `reading.py` and
`writing.py` are what a transaction function sees, `rows.py` turns nouns into rows, `link.py` says what the
rest needs of a database. Nothing here decides what should happen to a job: it keeps what the controller's
verbs decided.
"""
