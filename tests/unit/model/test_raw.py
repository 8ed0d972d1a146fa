"""What the system gives as bytes arrives at a rank as the same bytes."""

import os

from hypothesis import given
from hypothesis import strategies as st

from perdure.model.bus.wire import KeeperSpawn, RankLaunch
from perdure.model.codec import decode, encode
from perdure.model.input.raw import (
    carry_job,
    carry_text,
    carry_variables,
    restore_job,
    restore_spawn,
)
from perdure.model.job import JobSpec

pieces = st.one_of(st.binary(max_size=20), st.text("\ufdd0e9", max_size=9).map(os.fsencode))
raw = st.lists(pieces).map(lambda all_: os.fsdecode(b"".join(all_).replace(b"\0", b"/")))


@given(raw)
def test_text_is_carried_through_json(text: str) -> None:
    job = JobSpec(name="j", script=text, args=(text,), cwd=text, env={text: text})
    assert restore_job(decode(encode(carry_job(job)), JobSpec)) == job
    launch = RankLaunch(0, carry_variables({text: text}), "", "", "")
    carried = carry_text(text)
    order = KeeperSpawn(0, (launch,), carried, (carried,), False, False, carried, False)
    restored = restore_spawn(decode(encode(order), KeeperSpawn))
    assert restored.args == (text,)
    assert restored.ranks[0].env == {text: text}
    assert os.fsencode(restored.cwd) == os.fsencode(text)
