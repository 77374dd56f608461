"""The SDK: sync and async clients, job handles, what they raise. What `import penstock` offers.

Names are loaded when they are first used: a command that lists jobs never pays for httpx2. It must not import server
code.
"""

from importlib import import_module

_WHERE = {
    "ApiError": "penstock.client.errors:ApiError",
    "AsyncClient": "penstock.client.aio:AsyncClient",
    "AsyncJob": "penstock.client.job:AsyncJob",
    "Client": "penstock.client.client:Client",
    "Job": "penstock.client.job:Job",
    "JobFailed": "penstock.client.errors:JobFailed",
    "Unreachable": "penstock.client.errors:Unreachable",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
