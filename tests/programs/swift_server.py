"""OpenStack Swift in one process, with its S3 interface: `swift_server.py FOLDER PORT ACCOUNT USER SECRET`.

Swift is four servers that find each other by rings. Here each has one device, one replica, and a port on loopback.
"""

import signal
import sys
from pathlib import Path

from swift.common import utils

utils.monkey_patch()

import eventlet.wsgi  # noqa: E402
from swift.common import wsgi  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.storage_policy import reload_storage_policies  # noqa: E402

SWIFT = """
[swift-hash]
swift_hash_path_suffix = tests
[storage-policy:0]
name = only
default = yes
"""
COMMON = """
[DEFAULT]
swift_dir = {folder}
devices = {folder}
mount_check = false
log_address = /nonexistent
"""
BACKEND = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
PROXY = """
[pipeline:main]
pipeline = healthcheck s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{user} = {secret} .admin
[filter:slo]
use = egg:swift#slo
"""


def main(folder: Path, port: int, account: str, user: str, secret: str) -> None:
    common = COMMON.format(folder=folder)
    (folder / "device").mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text(SWIFT)
    utils.set_swift_dir(str(folder))
    reload_storage_policies()
    utils.validate_configuration()
    sockets = {}
    for kind in ("account", "container", "object"):
        sockets[kind] = eventlet.listen(("127.0.0.1", 0))
        write_ring(folder / f"{kind}.ring.gz", sockets[kind].getsockname()[1])
        (folder / f"{kind}.conf").write_text(common + BACKEND.format(kind=kind))
    sockets["proxy"] = eventlet.listen(("127.0.0.1", port))
    (folder / "proxy.conf").write_text(common + PROXY.format(account=account, user=user, secret=secret))
    servers = [eventlet.spawn(serve, socket, folder / f"{kind}.conf") for kind, socket in sockets.items()]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for server in servers:
        server.wait()


def write_ring(path: Path, port: int) -> None:
    """The one place where everything of a kind is."""
    address = {"ip": "127.0.0.1", "port": port, "replication_ip": "127.0.0.1", "replication_port": port}
    builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "weight": 1, "device": "device", **address})
    builder.rebalance()
    builder.get_ring().save(str(path))


def serve(socket: object, settings: Path) -> None:
    app = wsgi.loadapp(str(settings), global_conf={"log_name": settings.stem})
    protocol = wsgi.SwiftHttpProtocol
    eventlet.wsgi.server(socket, app, log_output=False, protocol=protocol, capitalize_response_headers=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
