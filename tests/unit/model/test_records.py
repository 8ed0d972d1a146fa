"""Documents prove themselves: what is not as it was written is refused, an older one believed."""

import pytest
from tests.unit.model.test_chain import flip

from perdure.model.bus.endpoint import Endpoint
from perdure.model.codec import encode
from perdure.model.errors import ProtocolError
from perdure.model.job import JobSpec
from perdure.model.records import decode_record, encode_record

ENDPOINT = Endpoint(url="nats://127.0.0.1:4222", token="s3cr3t", clock_offset_s=1.5)


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    data = encode_record(ENDPOINT) + b"\n"
    assert decode_record(data, Endpoint) == ENDPOINT
    read = 0
    for bit in range(8 * len(data)):
        try:
            assert decode_record(flip(data, bit), Endpoint) == ENDPOINT, bit
            read += 1
        except ProtocolError:
            continue
    assert read < 100  # Of the word `hash` alone.
    for length in range(len(data) - 2):
        with pytest.raises(ProtocolError):
            decode_record(data[:length], Endpoint)


def test_what_has_no_hash_is_read_as_ever() -> None:
    assert decode_record(encode(ENDPOINT), Endpoint) == ENDPOINT
    assert decode_record(encode_record([1, 2]), list[int]) == [1, 2]
    assert decode_record(encode_record({}), dict[str, int]) == {}


def test_a_document_that_takes_no_other_fields_is_read() -> None:
    spec = JobSpec(name="job", script="train.py", nproc=2)
    assert decode_record(encode_record(spec), JobSpec) == spec
