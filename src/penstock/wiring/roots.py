"""The server's bucket: opened once, by the address the operator gave (`objects.addresses` knows what it means).

A bucket that is not there, or not ours, is told at the start; one that cannot be reached just now is not, because a
server that starts during an outage must come up when it ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

from penstock.objects.addresses import open_address
from penstock.objects.directory import DirectoryObjects
from penstock.ports.objects import ObjectsError, Stock
from penstock.wiring.home import Unusable

logger = logging.getLogger(__name__)


def open_objects(address: str, environment: Mapping[str, str] = os.environ, field: str = "root") -> tuple[Stock, str]:
    """The bucket at an address, and the address as agents understand it. `field`: the setting that names it."""
    found, understood = open_address(field, address, environment)
    if not isinstance(found, DirectoryObjects):
        from penstock.objects.bucket import NoBucket

        try:
            found.probe()
        except NoBucket as error:
            raise Unusable(f"{field}: {error}") from error
        except ObjectsError as error:
            logger.warning("the bucket does not answer yet: %s", error)
    return found, understood


def open_regions(
    regions: Iterable[tuple[str, str]], main: str, environment: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, Stock]]:
    """The region of the main root ("" if no region has it), and the roots of regions that have another one.

    Regions that share a root share its bucket object too: that they are one is seen by that.
    """
    own, roots = "", dict[str, Stock]()
    opened: dict[str, Stock] = {}
    for region, address in regions:
        objects, plain = open_objects(address, environment, f"regions.{region}")
        if plain == main:
            own = own or region
        else:
            roots[region] = opened.setdefault(plain, objects)
    return own, roots
