"""The embedded server in the background: `python -m penstock.wiring READY_FD`, started by `wiring.embedded`.

It serves the state directory that PENSTOCK_HOME names. The descriptor gets one line, the address, once requests are
answered; it closes without one when the server could not start, and the last line of the log then says why.
"""

from __future__ import annotations

import logging
import os
import sys

from penstock.domain.admission import BadInput
from penstock.wiring.settings import load, load_cloud, load_regions, load_retention, server_settings


def main(ready_fd: int) -> int:
    try:
        own = (load_retention(os.environ), load_cloud(os.environ), load_regions(os.environ))
        settings = server_settings(*load(os.environ), *own)
        # Imported late: settings that are wrong are told in a tenth of the time.
        from penstock.wiring.serve import log_to_stderr, run

        log_to_stderr(settings.log_level)

        def ready(url: str) -> None:
            os.write(ready_fd, f"{url}\n".encode())
            os.close(ready_fd)

        run(settings, ready)
    except (BadInput, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 3
    except Exception:
        logging.getLogger(__name__).exception("the server failed")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
