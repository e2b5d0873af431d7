"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

PROBE_SECONDS = 3.0


def reachable() -> bool:
    """Whether the hub, or the proxy to it, accepts a connection within three seconds; False in offline mode.

    Without a network, the hub's own clients try for half a minute and report every try.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    address = urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    target = (address.hostname or "", address.port or (443 if address.scheme == "https" else 80))
    answers: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(target, PROBE_SECONDS).close()
            answers.append(True)
        except OSError:
            pass

    # It runs in a thread: name resolution has no time-out, and every address of a name has its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)


def is_cached(hub_id: str, cache_dir: Path) -> bool:
    """Whether there may be a copy of a data set of the hub, below `cache_dir` or in the caches of the hub's clients."""
    from huggingface_hub import constants

    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    copies = (
        prepared / hub_id.replace("/", "___"),
        Path(constants.HF_HUB_CACHE) / f"datasets--{hub_id.replace('/', '--')}",
    )
    return any(path.exists() for path in copies) or any((cache_dir / "hub").glob("*.arrow"))
