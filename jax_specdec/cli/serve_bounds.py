"""Options for what one client of the server may take from the others."""

import argparse
import ipaddress
import resource
from dataclasses import fields
from typing import Any

from jax_specdec.cli.argument_types import integer, seconds
from jax_specdec.serve.bounds import LOOPBACK, Bounds, host_name

OTHER_FILES = 256  # that a server has open, beside its connections
_NAMES = {field.name for field in fields(Bounds)}


def add_bounds(parser: Any) -> None:
    """Add the options."""
    group = parser.add_argument_group("bounds")
    group.add_argument("--max-body", type=integer(1), metavar="BYTES",
        help="of a request (default: 1048576, and 64 for each token of --max-length); eight of the "
        "largest may be on their way at once")  # fmt: skip
    group.add_argument("--max-open", type=integer(1), default=1024, metavar="N",
        help="requests at once (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-waiting", type=integer(1), default=1024, metavar="N",
        help="choices that may wait for a slot (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-connections", type=integer(1, 2**16), default=1024, metavar="N",
        help="at once; above it, those end first that bring no request (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--max-prompt-logprobs", type=integer(1), default=1024 * 20 * 8, metavar="N",
        help="prompt tokens times K times choices of one request that asks for the prompt's "
        "logprobs (default: %(default)s, which is 1024 x 20 x 8)")  # fmt: skip
    group.add_argument("--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="of one request (default: %(default)g)")  # fmt: skip
    group.add_argument("--client-timeout", type=seconds, default=30.0, metavar="SECONDS",
        help="that a client may take to send the head of a request, to send its body, and to read "
        "each part of an answer (default: %(default)g)")  # fmt: skip
    group.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
        help="by which clients may call the server, beside those of loopback; * for any; may be "
        "given several times (default: none; on another --host than loopback it must be "
        "given)")  # fmt: skip


def bounds(options: argparse.Namespace) -> Bounds:
    """The options as the server's bounds.

    Raises:
      ValueError: others can reach the server, and --allowed-host is missing.
    """
    values = {name: value for name, value in vars(options).items() if name in _NAMES}
    return Bounds(allowed_hosts=_hosts(options.host, options.allowed_host), **values)


def allow_files(num_connections: int) -> None:
    """Let this process have so many connections open; errors as `files_needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed := files_needed(num_connections, soft, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def files_needed(num_connections: int, soft: int, hard: int) -> int:
    """The limit of open files that so many connections need; 0 where the soft one will do.

    Raises:
      ValueError: the system does not allow it; says how many it allows.
    """
    needed, endless = num_connections + OTHER_FILES, resource.RLIM_INFINITY
    if soft == endless or soft >= needed:
        return 0
    if hard != endless and hard < needed:
        raise ValueError(
            f"--max-connections {num_connections} needs {needed} open files, and the system allows "
            f"{hard} (ulimit -Hn): give --max-connections {max(hard - OTHER_FILES, 1)}"
        )
    return needed


def _hosts(host: str, names: list[str]) -> frozenset[str] | None:
    """The names by which the server may be called; None: any.

    A page in a browser can have its own name lead to any address (DNS rebinding): a server that
    answers to it would be read by that page. No page's name is one of loopback's.
    """
    if "*" in names:
        return None
    if not names and not _is_loopback(host):
        raise ValueError(
            f"--host {host} is reached by others: say by which name they call the server "
            "(--allowed-host NAME), or let them use any (--allowed-host '*')"
        )
    host_names = () if host in ("0.0.0.0", "::", "") else (host_name(host),)
    return frozenset((*LOOPBACK, *host_names, *map(host_name, names)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
