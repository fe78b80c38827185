"""Whether the Hugging Face hub answers: its client retries for half a minute before it says that it is away."""

import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.contract.facts import PreflightRequest

PROBE_S = 3.0
_DEFAULT_ENDPOINT = "https://huggingface.co"
_PORTS = {"http": 80, "https": 443}


def needs_hub(request: PreflightRequest) -> bool:
    """Whether the model, the data or the tokenizer is named by a hub id."""
    tokenizer = request.data.tokenizer
    is_hub_tokenizer = tokenizer is not None and not Path(tokenizer).exists()
    return request.model.id is not None or request.data.id is not None or is_hub_tokenizer


def hub_answers(environment: Mapping[str, str]) -> bool:
    """Whether the hub that a process with this `environment` uses accepts a connection within `PROBE_S`."""
    endpoint = urlsplit(environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT)
    port = endpoint.port or _PORTS.get(endpoint.scheme, 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
