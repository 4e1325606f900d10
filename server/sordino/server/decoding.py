"""Bytes that are no message get INVALID_ARGUMENT; gRPC by itself answers them with INTERNAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

MALFORMED: Final = "the bytes are not a message of this call: cut short, or damaged"


class DecodingInterceptor(grpc.ServerInterceptor):
    """Decodes requests inside the call, where a failure can get a status of ours.

    A stream's messages are decoded one by one as the service asks for them; it turns the DecodeError into the status.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        found = continuation(handler_call_details)
        handler: Any = found
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return found
        decode = handler.request_deserializer

        def decoded(raw: bytes, context: grpc.ServicerContext) -> Any:
            try:
                return decode(raw)
            except DecodeError:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)

        def unary(raw: bytes, context: grpc.ServicerContext) -> Any:
            return handler.unary_unary(decoded(raw, context), context)

        def unary_stream(raw: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
            return handler.unary_stream(decoded(raw, context), context)  # type: ignore[no-any-return]

        def stream(raw: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            return handler.stream_stream(map(decode, raw), context)  # type: ignore[no-any-return]

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(unary_stream, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)
