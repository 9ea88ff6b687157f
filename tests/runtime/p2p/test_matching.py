"""Which message goes to which receive, against a model that looks through everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lossycoll.runtime.p2p.matching import Mailbox

SOURCES = (0, 1, 2)
TAGS = (0, 7)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "post", "post any", "forget", "drop")),
        st.sampled_from(SOURCES),
        st.sampled_from(TAGS),
    ),
    max_size=60,
)


class Model:
    """Lists in the order of events: (source or None, tag, number)."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, int, int]] = []
        self.posted: list[tuple[int | None, int, int]] = []

    def arrive(self, source: int, tag: int, number: int) -> int | None:
        for entry in self.posted:
            if entry[0] in (None, source) and entry[1] == tag:
                self.posted.remove(entry)
                return entry[2]
        self.arrived.append((source, tag, number))
        return None

    def post(self, source: int | None, tag: int, number: int) -> int | None:
        for entry in self.arrived:
            if source in (None, entry[0]) and entry[1] == tag:
                self.arrived.remove(entry)
                return entry[2]
        self.posted.append((source, tag, number))
        return None


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_matches_are_those_of_a_search_through_everything(
    events: list[tuple[str, int, int]],
) -> None:
    mailbox: Mailbox[int, int] = Mailbox()
    model = Model()
    for number, (event, source, tag) in enumerate(events):
        if event == "arrive":
            assert mailbox.arrive(source, tag, number) == model.arrive(source, tag, number)
        elif event == "forget":
            mailbox.forget(lambda receive: receive % 3 == 0)
            model.posted = [entry for entry in model.posted if entry[2] % 3]
        elif event == "drop":
            mailbox.drop(source)
            model.arrived = [entry for entry in model.arrived if entry[0] != source]
        else:
            wanted = None if event == "post any" else source
            assert mailbox.post(wanted, tag, number) == model.post(wanted, tag, number)


def test_any_source_takes_what_came_first_and_a_source_what_it_sent_first() -> None:
    mailbox: Mailbox[str, str] = Mailbox()
    for source, message in ((2, "a"), (1, "b"), (2, "c"), (1, "d")):
        assert mailbox.arrive(source, 0, message) is None
    assert mailbox.post(1, 0, "r1") == "b"
    assert mailbox.post(None, 0, "r2") == "a"
    assert mailbox.post(None, 5, "r3") is None
    assert mailbox.post(None, 0, "r4") == "c"
    assert mailbox.post(2, 0, "r5") is None
    assert mailbox.post(None, 0, "r6") == "d"
    assert mailbox.post(None, 0, "r7") is None
    assert mailbox.arrive(1, 0, "e") == "r7"
    assert mailbox.arrive(2, 0, "f") == "r5"
    assert mailbox.arrive(1, 5, "g") == "r3"
