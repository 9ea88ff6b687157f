"""The picture of the layers agrees with the import contracts."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.layers_picture import PICTURE, layers_of, picture


def test_the_committed_picture_is_that_of_the_contracts() -> None:
    found = PICTURE.read_text(encoding="utf-8")
    assert found == picture(), "write it again: python -m tools.layers_picture"


def test_every_package_of_a_contract_is_drawn_below_those_that_may_import_it() -> None:
    texts = [e for e in ElementTree.fromstring(picture()).iter() if e.tag.endswith("text")]
    for container in ("lossycoll", "lossycoll.runtime", "lossycoll.train"):
        heights = []
        for row in layers_of(container):
            found = {int(e.attrib["y"]) for e in texts if e.text in row}
            assert found, row
            heights.append(max(found))
        assert heights == sorted(heights)
