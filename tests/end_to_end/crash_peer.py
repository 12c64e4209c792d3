"""Run a peer in a process that kills itself with SIGKILL at a point of its exchanges, the N-th time
that it comes by.

python crash_peer.py POINT N peer --book BOOK ...
"""

from __future__ import annotations

import sys

from dying import Point, signal_at
from fleetlearn_device.__main__ import main
from fleetlearn_device.peers import peer_store
from fleetlearn_device.peers.link import PeerLink
from fleetlearn_device.peers.local_training import LocalTraining
from fleetlearn_device.peers.node import PeerNode
from fleetlearn_device.peers.peer_store import PeerStore

POINTS = {
    "a training is done": Point(LocalTraining, "train", True),
    "a model is to be committed": Point(PeerStore, "commit", False),
    "a file is to take its place": Point(peer_store, "write_durably", False),
    "a file has its place": Point(peer_store, "write_durably", True),
    "a model is committed": Point(PeerStore, "commit", True),
    "a model is to be sent": Point(PeerLink, "send_model", False),
    "a model is queued": Point(PeerLink, "send_model", True),
    "a difference is written": Point(PeerStore, "save_difference", True),
    "a vote is to be saved": Point(PeerStore, "save", False),
    "a vote is saved": Point(PeerStore, "save", True),
    "a message is to be sent": Point(PeerLink, "send", False),
    "a message came": Point(PeerNode, "_received", True),
}

if __name__ == "__main__":
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
