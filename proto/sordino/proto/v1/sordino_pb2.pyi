from sordino.proto.v1 import dealer_pb2 as _dealer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Protocol(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROTOCOL_UNSPECIFIED: _ClassVar[Protocol]
    PROTOCOL_MASKED: _ClassVar[Protocol]
    PROTOCOL_CLEAR: _ClassVar[Protocol]
    PROTOCOL_RLWE: _ClassVar[Protocol]
    PROTOCOL_TWO_PARTY: _ClassVar[Protocol]
PROTOCOL_UNSPECIFIED: Protocol
PROTOCOL_MASKED: Protocol
PROTOCOL_CLEAR: Protocol
PROTOCOL_RLWE: Protocol
PROTOCOL_TWO_PARTY: Protocol

class GetManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "max_message_bytes", "protocols", "version", "first_group", "group_count")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    max_message_bytes: int
    protocols: _containers.RepeatedScalarFieldContainer[Protocol]
    version: str
    first_group: int
    group_count: int
    def __init__(self, manifest: _Optional[bytes] = ..., max_message_bytes: _Optional[int] = ..., protocols: _Optional[_Iterable[_Union[Protocol, str]]] = ..., version: _Optional[str] = ..., first_group: _Optional[int] = ..., group_count: _Optional[int] = ...) -> None: ...

class FetchFileRequest(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ProvisionRequest(_message.Message):
    __slots__ = ("group", "seed", "c0", "masks", "block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    C0_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    seed: bytes
    c0: bytes
    masks: MaskBlock
    block: BlockProduct
    def __init__(self, group: _Optional[int] = ..., seed: _Optional[bytes] = ..., c0: _Optional[bytes] = ..., masks: _Optional[_Union[MaskBlock, _Mapping]] = ..., block: _Optional[_Union[BlockProduct, _Mapping]] = ...) -> None: ...

class MaskBlock(_message.Message):
    __slots__ = ("block", "points")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    block: int
    points: int
    def __init__(self, block: _Optional[int] = ..., points: _Optional[int] = ...) -> None: ...

class BlockProduct(_message.Message):
    __slots__ = ("rows", "inputs", "outputs", "first_input", "input_count", "first_output", "output_count", "transposed", "answer_bits")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSPOSED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BITS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    inputs: int
    outputs: int
    first_input: int
    input_count: int
    first_output: int
    output_count: int
    transposed: bool
    answer_bits: int
    def __init__(self, rows: _Optional[int] = ..., inputs: _Optional[int] = ..., outputs: _Optional[int] = ..., first_input: _Optional[int] = ..., input_count: _Optional[int] = ..., first_output: _Optional[int] = ..., output_count: _Optional[int] = ..., transposed: _Optional[bool] = ..., answer_bits: _Optional[int] = ...) -> None: ...

class ProvisionResponse(_message.Message):
    __slots__ = ("group", "c0", "c1")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    C0_FIELD_NUMBER: _ClassVar[int]
    C1_FIELD_NUMBER: _ClassVar[int]
    group: int
    c0: bytes
    c1: bytes
    def __init__(self, group: _Optional[int] = ..., c0: _Optional[bytes] = ..., c1: _Optional[bytes] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("open", "id", "group", "rows", "data", "block", "seed")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    open: Open
    id: int
    group: int
    rows: int
    data: bytes
    block: BlockProduct
    seed: bytes
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., id: _Optional[int] = ..., group: _Optional[int] = ..., rows: _Optional[int] = ..., data: _Optional[bytes] = ..., block: _Optional[_Union[BlockProduct, _Mapping]] = ..., seed: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("fingerprint", "protocol")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    protocol: Protocol
    def __init__(self, fingerprint: _Optional[str] = ..., protocol: _Optional[_Union[Protocol, str]] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("id", "data", "compute_us", "c1")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    C1_FIELD_NUMBER: _ClassVar[int]
    id: int
    data: bytes
    compute_us: int
    c1: bytes
    def __init__(self, id: _Optional[int] = ..., data: _Optional[bytes] = ..., compute_us: _Optional[int] = ..., c1: _Optional[bytes] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("id", "open", "append", "drop", "products")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    open: Open
    append: PageAppend
    drop: PageDrop
    products: PageProducts
    def __init__(self, id: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., append: _Optional[_Union[PageAppend, _Mapping]] = ..., drop: _Optional[_Union[PageDrop, _Mapping]] = ..., products: _Optional[_Union[PageProducts, _Mapping]] = ...) -> None: ...

class Ciphertexts(_message.Message):
    __slots__ = ("count", "seed", "c0", "primes")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    C0_FIELD_NUMBER: _ClassVar[int]
    PRIMES_FIELD_NUMBER: _ClassVar[int]
    count: int
    seed: bytes
    c0: bytes
    primes: int
    def __init__(self, count: _Optional[int] = ..., seed: _Optional[bytes] = ..., c0: _Optional[bytes] = ..., primes: _Optional[int] = ...) -> None: ...

class PageAppend(_message.Message):
    __slots__ = ("first", "pages")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    first: int
    pages: Ciphertexts
    def __init__(self, first: _Optional[int] = ..., pages: _Optional[_Union[Ciphertexts, _Mapping]] = ...) -> None: ...

class PageDrop(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class PageProducts(_message.Message):
    __slots__ = ("operands", "sums", "first", "step", "count")
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    operands: Ciphertexts
    sums: _containers.RepeatedCompositeFieldContainer[PageSum]
    first: int
    step: int
    count: int
    def __init__(self, operands: _Optional[_Union[Ciphertexts, _Mapping]] = ..., sums: _Optional[_Iterable[_Union[PageSum, _Mapping]]] = ..., first: _Optional[int] = ..., step: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class PageSum(_message.Message):
    __slots__ = ("operands", "pages")
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    operands: _containers.RepeatedScalarFieldContainer[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, operands: _Optional[_Iterable[int]] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("id", "c0", "c1", "c2", "compute_us")
    ID_FIELD_NUMBER: _ClassVar[int]
    C0_FIELD_NUMBER: _ClassVar[int]
    C1_FIELD_NUMBER: _ClassVar[int]
    C2_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    id: int
    c0: bytes
    c1: bytes
    c2: bytes
    compute_us: int
    def __init__(self, id: _Optional[int] = ..., c0: _Optional[bytes] = ..., c1: _Optional[bytes] = ..., c2: _Optional[bytes] = ..., compute_us: _Optional[int] = ...) -> None: ...

class ComputeRequest(_message.Message):
    __slots__ = ("open", "session", "products", "forward", "words", "ahead")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    open: Open
    session: PartySession
    products: WordProducts
    forward: Forward
    words: bytes
    ahead: _dealer_pb2.Pass
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., session: _Optional[_Union[PartySession, _Mapping]] = ..., products: _Optional[_Union[WordProducts, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., words: _Optional[bytes] = ..., ahead: _Optional[_Union[_dealer_pb2.Pass, _Mapping]] = ...) -> None: ...

class PartySession(_message.Message):
    __slots__ = ("session", "digest", "public_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    digest: bytes
    public_key: bytes
    def __init__(self, session: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("numbers", "positions", "visible", "opened", "temperature")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    numbers: _dealer_pb2.Pass
    positions: _containers.RepeatedScalarFieldContainer[int]
    visible: bytes
    opened: _containers.RepeatedScalarFieldContainer[int]
    temperature: int
    def __init__(self, numbers: _Optional[_Union[_dealer_pb2.Pass, _Mapping]] = ..., positions: _Optional[_Iterable[int]] = ..., visible: _Optional[bytes] = ..., opened: _Optional[_Iterable[int]] = ..., temperature: _Optional[int] = ...) -> None: ...

class WordProducts(_message.Message):
    __slots__ = ("layer", "matrix", "rows", "ciphertexts", "last")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MATRIX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CIPHERTEXTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    matrix: int
    rows: int
    ciphertexts: bytes
    last: bool
    def __init__(self, layer: _Optional[int] = ..., matrix: _Optional[int] = ..., rows: _Optional[int] = ..., ciphertexts: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class ComputeResponse(_message.Message):
    __slots__ = ("plan", "joined", "answers", "words")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    plan: PartyPlan
    joined: bool
    answers: WordAnswers
    words: bytes
    def __init__(self, plan: _Optional[_Union[PartyPlan, _Mapping]] = ..., joined: _Optional[bool] = ..., answers: _Optional[_Union[WordAnswers, _Mapping]] = ..., words: _Optional[bytes] = ...) -> None: ...

class PartyPlan(_message.Message):
    __slots__ = ("plan", "opened")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    opened: int
    def __init__(self, plan: _Optional[bytes] = ..., opened: _Optional[int] = ...) -> None: ...

class WordAnswers(_message.Message):
    __slots__ = ("ciphertexts", "last")
    CIPHERTEXTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ciphertexts: bytes
    last: bool
    def __init__(self, ciphertexts: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...
