from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BeginRequest(_message.Message):
    __slots__ = ("fingerprint", "plan")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    plan: bytes
    def __init__(self, fingerprint: _Optional[str] = ..., plan: _Optional[bytes] = ...) -> None: ...

class BeginResponse(_message.Message):
    __slots__ = ("session", "key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: bytes
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("session", "fingerprint", "plan")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    fingerprint: str
    plan: bytes
    def __init__(self, session: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., plan: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class EndResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DealRequest(_message.Message):
    __slots__ = ("open",)
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    open: bytes
    def __init__(self, open: _Optional[bytes] = ..., **kwargs) -> None: ...

class Pass(_message.Message):
    __slots__ = ("number", "rows", "first_counter", "kept", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_COUNTER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    rows: int
    first_counter: int
    kept: _containers.RepeatedCompositeFieldContainer[Counters]
    tokens: int
    def __init__(self, number: _Optional[int] = ..., rows: _Optional[int] = ..., first_counter: _Optional[int] = ..., kept: _Optional[_Iterable[_Union[Counters, _Mapping]]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class DealResponse(_message.Message):
    __slots__ = ("number", "points", "corrections", "last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    points: bytes
    corrections: bytes
    last: bool
    def __init__(self, number: _Optional[int] = ..., points: _Optional[bytes] = ..., corrections: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...
