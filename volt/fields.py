"""Names, numbers and kinds of messages of which Volt's API is made (volt/models.py, volt/deploymodels.py)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
DIGEST_PATTERN = r"^[a-z][a-z0-9-]{0,15}:[0-9A-Za-z]{1,128}$"
ADDRESS_PATTERN = r"^[a-z][a-z0-9+.-]*:[!-~]+$"
PLACE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62}(/[A-Za-z0-9][A-Za-z0-9_-]{0,62})?)?$"
AGENT_PATTERN = r"^([0-9a-f]{32})?$"
AGENT_HEADER = "Volt-Agent"
"""The header of a request that names the agent that sends it; ``volt.api.AgentHeader`` reads it."""
MAX_INTEGER = 2**63 - 1


Name = Annotated[str, Field(pattern=NAME_PATTERN, description="Name of a host or an image")]
Where = Annotated[str, Field(pattern=PLACE_PATTERN, description="Site and rack of a host: SITE/RACK, SITE or empty")]
Address = Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=512, description="URI of a host's images")]
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN, description="What identifies the content: kind:value")]


def _whole(number: object) -> object:
    """To JSON, 1.0 is an integer."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Size = Annotated[int, Field(gt=0, le=MAX_INTEGER, multiple_of=512, description="Bytes"), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER), BeforeValidator(_whole)]


class State(StrEnum):
    """What something is like; each has a member ``UNKNOWN``."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """A state of a later version."""
        return cls("unknown") if isinstance(value, str) else None


class Request(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(strict=True)


class Answer(BaseModel):
    """What Volt answers."""

    # Errors get into logs with their causes, so they must not repeat answers, which have secrets.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)
