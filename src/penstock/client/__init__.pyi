# What type checkers see of `penstock.client`, whose names are loaded when they are first used.

from penstock.client.aio import AsyncClient as AsyncClient
from penstock.client.client import Client as Client
from penstock.client.errors import ApiError as ApiError
from penstock.client.errors import JobFailed as JobFailed
from penstock.client.errors import Unreachable as Unreachable
from penstock.client.job import AsyncJob as AsyncJob
from penstock.client.job import Job as Job
