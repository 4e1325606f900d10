"""Bytes that are no message get INVALID_ARGUMENT; gRPC by itself answers them with UNKNOWN.

A stream's messages are decoded inside the call, where the service turns the failure into a status itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MALFORMED: Final = "the bytes are not a message of this call: cut short, or damaged"


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Decodes the single request of a call inside its handler."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        found = await continuation(handler_call_details)
        handler: Any = found
        if handler is None or handler.request_streaming or not handler_call_details.method.startswith(self._prefix):
            return found

        async def decoded(raw: bytes, context: Context) -> Any:
            try:
                return handler.request_deserializer(raw)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)

        async def stream(raw: bytes, context: Context) -> AsyncIterator[Any]:
            async for response in handler.unary_stream(await decoded(raw, context), context):
                yield response

        async def unary(raw: bytes, context: Context) -> Any:
            return await handler.unary_unary(await decoded(raw, context), context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)
