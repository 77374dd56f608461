"""The startup script of a cloud host: from a bare image to a joined agent, with a shell, curl and tar and nothing else.

`capacity.tpu_vm` puts it into the metadata of every node. It runs as root at every boot and may run twice: each step
looks whether it is done already. It tells the server how far it came (`/v1/agent/arriving`), and its last lines when it
fails. Every value is quoted here, whatever checked it before. It must not wait for package managers or use the image's
Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.domain.cloud import Mount
from penstock.domain.mounts import mount_words

#: Metadata keys of ours. The join token serves each host once, and goes once all of them have joined (ADR 0030).
TOKEN_KEY: Final = "penstock-join"
SCRIPT_KEY: Final = "startup-script"

_MARK: Final = "\n# Penstock brings this host up."  #: by which a script of ours is known
_ELSE_JOINED: Final = '$(meta attributes/penstock-join || [ -f "$STATE/host/credential.json" ])'
_SCRIPT: Final = r"""#!/bin/sh
# Penstock brings this host up. It runs at every boot, and may be run again by hand.
set -eu
umask 022
STATE=/var/lib/penstock
mkdir -p "$STATE"
chmod 711 "$STATE"
exec >>"$STATE/startup.log" 2>&1
# A boot and somebody's hand at once would clear away each other's downloads: the second waits, and finds all done.
if command -v flock >/dev/null; then
    exec 9>"$STATE/startup.lock"
    flock 9
fi
echo "--- $(date -u) on $(hostname)"
META="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance"

meta() { curl -sSf --retry 8 --retry-delay 1 --retry-connrefused -H 'Metadata-Flavor: Google' "$META/$1"; }

# A host that has joined needs no token, and its node has none any more.
TOKEN=$(meta attributes/penstock-join || [ -f "$STATE/host/credential.json" ])
MACHINE=$(meta attributes/penstock-machine)
HOST=$(meta attributes/agent-worker-number)

tell() { # STEP: how far this host is; the server may be away, which is no reason to stop
    printf '%s' "${2:-}" | tail -c 4000 | curl -sS -m 10 -o /dev/null -X POST -H "Authorization: Bearer $TOKEN" \
        -H 'Content-Type: text/plain' --data-binary @- \
        "$SERVER/v1/agent/arriving?slice=$SLICE&host=$HOST&machine=$MACHINE&step=$1" || true
}

failed() {
    status=$?
    [ "$status" -eq 0 ] || tell failed "$(tail -n 20 "$STATE/startup.log")"
}
trap failed EXIT

libc=$(ldd --version 2>/dev/null | head -n 1 | grep -o '[0-9][0-9.]*$' || echo 0)
oldest=$(printf '%s\n%s\n' "$BUILT_FOR" "$libc" | sort -V | head -n 1)
if [ "$oldest" != "$BUILT_FOR" ]; then
    echo "this image has C library $libc; the agent bundle needs $BUILT_FOR or newer: choose a newer runtime version"
    exit 1
fi

BUNDLE="$STATE/bundle-$SHA256"
if [ ! -d "$BUNDLE" ]; then
    tell fetching
    rm -rf "$STATE"/partial-*
    part="$STATE/partial-$$"
    mkdir "$part"
    packed="$part/bundle.tar.gz"
    fetched=
    for try in 1 2 3 4 5 6 7 8; do
        for source in $SOURCES; do
            if "from_$source" "$packed" && echo "$SHA256  $packed" | sha256sum -c --status -; then
                fetched=$source
                break 2
            fi
            echo "the agent bundle did not arrive whole from the $source (try $try)"
        done
        sleep "$try"
    done
    [ -n "$fetched" ]
    tell unpacking
    mkdir "$part/bundle"
    tar -xzf "$packed" -C "$part/bundle" --no-same-owner
    rm "$packed"
    mv "$part/bundle" "$BUNDLE"
    rmdir "$part"
fi

mounts 9>&- # what serves a mount lives on, and must not keep the lock
if [ ! -d /run/systemd/system ] && [ -f "$STATE/agent.pid" ] && kill -0 "$(cat "$STATE/agent.pid")" 2>/dev/null; then
    echo "the agent runs already"
    exit 0
fi
tell starting
umask 077
printf '%s' "$TOKEN" >"$STATE/join-token"
umask 022
cat >"$STATE/agent" <<'EOT'
#!/bin/sh
# Keeps the agent running until the server no longer wants this host.
while :; do
    status=0
    "$@" || status=$?
    case $status in 0 | 4) exit 0 ;; esac
    echo "the agent ended with $status; starting it again"
    sleep 1
done
EOT
chmod 755 "$STATE/agent"
set -- "$STATE/agent" "$BUNDLE/bin/python3" -P -m penstock.agent --server "$SERVER" --slice "$SLICE" --host "$HOST" \
    --provider-id "$MACHINE" --state "$STATE/host" --token-file "$STATE/join-token" --metadata "$META"
if [ -d /run/systemd/system ]; then
    systemctl stop penstock-agent 2>/dev/null || true
    systemctl reset-failed penstock-agent 2>/dev/null || true
    systemd-run --unit=penstock-agent --property=KillMode=process --property=Delegate=yes \
        --property=Restart=on-failure --property=RestartSec=1 "$@"
else
    setsid nohup "$@" </dev/null >>"$STATE/agent.log" 2>&1 9>&- &
    echo $! >"$STATE/agent.pid"
fi
trap - EXIT
"""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What every host of an installation is told."""

    server: str
    bundle_url: str  #: of the server
    bucket_url: str = ""  #: of an object with the same bytes, which is nearer; "": there is none
    sha256: str
    built_for: str  #: the C library the bundle needs


def metadata(boot: Boot, slice: str, token: str, mounts: tuple[Mount, ...] = ()) -> dict[str, str]:
    """The metadata of one slice's node."""
    given = {"SERVER": boot.server, "SLICE": slice, "SHA256": boot.sha256, "BUILT_FOR": boot.built_for}
    head = "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items())
    first, rest = _SCRIPT.split("\n", 1)
    script = f"{first}\n{head}{_fetch(boot)}{_mounts(mounts)}{rest}"
    return {TOKEN_KEY: token, SCRIPT_KEY: script}


def by_hand(given: Mapping[str, str], machine: str) -> str:
    """The same script for a host whose metadata is not ours to write: what it would ask for stands in it."""
    script = given[SCRIPT_KEY]
    for name, key, value in (("TOKEN", TOKEN_KEY, given[TOKEN_KEY]), ("MACHINE", "penstock-machine", machine)):
        asked = next(line for line in script.splitlines() if line.startswith(f"{name}=$(meta attributes/{key}"))
        script = script.replace(f"{asked}\n", f"{name}={shlex.quote(value)}\n")
    return script


def is_ours(script: str) -> bool:
    """Whether a startup script was made here."""
    return _MARK in script


def needs_token(script: str) -> bool:
    """Whether a host could not boot again without its token: so it is with the scripts of earlier releases."""
    return _ELSE_JOINED not in script


def _fetch(boot: Boot) -> str:
    """How the bundle comes: from a bucket with the machine's own account where it lies there, and from the server.

    The join token is for the server alone, the account's for the bucket alone. What comes is held against its hash, so
    that a bucket which somebody else can write to is no way in.
    """
    asked = f'-H "Authorization: Bearer $TOKEN" "{_plain(boot.bundle_url)}?slice=$SLICE"'
    lines = [f'from_server() {{ curl -sSf -m 600 -o "$1" {asked}; }}']
    if boot.bucket_url:
        account = 'meta service-accounts/default/token | sed \'s/.*"access_token" *: *"\\([^"]*\\)".*/\\1/\''
        authorized = f'-H "Authorization: Bearer $({account})"'
        lines.append(f'from_bucket() {{ curl -sSf -m 600 -o "$1" {authorized} "{_plain(boot.bucket_url)}"; }}')
    lines.append(f"SOURCES='{'bucket server' if boot.bucket_url else 'server'}'")
    return "".join(f"{line}\n" for line in lines)


def _mounts(mounts: tuple[Mount, ...]) -> str:
    """Mounts are made at every boot, so that a replaced host has them too. One that fails fails the host."""
    lines = [line for mount in mounts for line in _mount(mount)]
    return "mounts() {\n" + "".join(f"    {line}\n" for line in lines or [":"]) + "}\n"


def _mount(mount: Mount) -> list[str]:
    path, command = shlex.quote(mount.path), shlex.join(mount_words(mount))
    return [f"mkdir -p {path}", f"mountpoint -q {path} || {command}"]


def _plain(url: str) -> str:
    """An address inside double quotes of a shell."""
    if any(letter in url for letter in '"$`\\\n') or not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no plain http address")
    return url
