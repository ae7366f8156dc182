"""Fields of a server that answers for a model: model name, timeout, prices and budget."""

from __future__ import annotations

from pydantic import Field

from unfreeze.config.parse import Frozen
from unfreeze.core.field import about


class Asked(Frozen):
    """Patience with an OpenAI-compatible server, and its price."""

    timeout: float = Field(
        default=120.0,
        gt=0,
        description="seconds to wait for a complete answer before asking again",
        json_schema_extra=about("Server", was="timeout", of_run=False),
    )
    price_read: float | None = Field(
        default=None,
        ge=0,
        description="USD per million tokens that the server reads; required for a server outside your"
        " network",
        json_schema_extra=about("Server", was="price_read", of_run=False),
    )
    price_written: float | None = Field(
        default=None,
        ge=0,
        description="USD per million tokens that the server writes",
        json_schema_extra=about("Server", was="price_written", of_run=False),
    )
    budget_usd: float = Field(
        default=0.0,
        ge=0,
        description="most USD for all calls, failed ones included; 0 refuses every paid call",
        json_schema_extra=about("Server", was="budget_usd", of_run=False),
    )


class EndpointConfig(Asked):
    """An OpenAI-compatible server. Its key comes from the environment variable OPENAI_API_KEY."""

    served_name: str = Field(
        default="",
        description="the model's name in the server's /v1/models; empty: the server's default",
        json_schema_extra=about("Server", was="served_name", of_run=False),
    )
