"""Carries packets between network namespaces, late and not all of them.

`python -m benchmarks.lossy_link NAMESPACE=ADDRESS …` makes a TUN device `link0` in each namespace
and passes IPv4 packets between them in user space: for kernels that lack the queueing discipline
`netem`. Prints `ready`, and runs until its standard input ends; the devices are gone with it.
Linux, root.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

DEVICE = "link0"
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossy_link")
    parser.add_argument("ends", nargs="+", metavar="NAMESPACE=ADDRESS")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets, 0 to 1")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ends = dict(end.split("=") for end in options.ends)
    devices = {socket.inet_aton(ends[name]): _device(name) for name in ends}
    print("ready", flush=True)
    _carry(devices, options.delay, options.loss, random.Random(options.seed))


def _device(namespace: str) -> int:
    """A descriptor of a new device there; this process is in that namespace afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
    return device


def _carry(devices: dict[bytes, int], delay: float, loss: float, draw: random.Random) -> None:
    poll, under_way, number = select.poll(), [], 0
    poll.register(sys.stdin.fileno(), select.POLLIN)
    for device in devices.values():
        poll.register(device, select.POLLIN)
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 1.0
        for ready, _ in poll.poll(left * 1000):
            if ready == sys.stdin.fileno():
                return
            packet = os.read(ready, _MOST_BYTES)
            # Of anything but IPv4 (an IPv6 router's advertisement) nobody is the receiver.
            target = devices.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is not None and draw.random() >= loss:
                number += 1
                heapq.heappush(under_way, (time.monotonic() + delay, number, target, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(under_way)
            try:
                os.write(target, packet)
            except OSError:  # the device is down or its queue is full: a packet is lost
                continue


if __name__ == "__main__":
    main()
