"""Which keys hold secrets: their values are never printed."""

from __future__ import annotations

import re
from typing import Any

# hf_hub_token, hub_token, swanlab_api_key, swanlab_lark_secret …, not split_special_tokens or max_new_tokens
_SECRET = re.compile(r"(?:^|_)(?:token|api_key|secret|password)$|webhook_url$", re.I)
MASK = "********"


def is_secret(key: str) -> bool:
    """Whether a key's value is a secret, by its name."""
    return _SECRET.search(key) is not None


def masked(key: str, value: Any) -> Any:
    """The value, or stars in its place."""
    return MASK if is_secret(key) and value else value
