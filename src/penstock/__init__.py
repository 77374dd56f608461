"""Penstock feeds work to TPUs: jobs in, capacity found, results out, nothing lost.

`import penstock` gives `Client`, `AsyncClient`, the errors they raise and `payload`, each loaded when it is first used,
so that importing any part of the package costs only that part. `ARCHITECTURE.md` says where everything is.
"""

from importlib import import_module

__version__ = "0.2.0"

#: Name -> module and what it is called there; a module that is called so itself is meant as a whole.
_WHERE = {
    "ApiError": "penstock.client:ApiError",
    "AsyncClient": "penstock.client:AsyncClient",
    "AsyncJob": "penstock.client:AsyncJob",
    "Client": "penstock.client:Client",
    "Job": "penstock.client:Job",
    "JobFailed": "penstock.client:JobFailed",
    "Unreachable": "penstock.client:Unreachable",
    "payload": "penstock.payload:payload",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, _, attribute = _WHERE[name].partition(":")
    module = import_module(where)
    value: object = module if where.endswith(f".{attribute}") else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
