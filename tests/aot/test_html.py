"""A report as a page."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_examples import huge, llama_8b_fits, llama_70b_out_of_memory, llama_shardings, meshes, reports

from shardtorch.aot._html import to_html
from shardtorch.aot._html_icicle import Node, icicle, segments
from shardtorch.aot._html_mesh import mesh_data, shown_places
from shardtorch.aot._report import CompileReport, Origin
from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, NamedSharding, P

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page's elements, texts and attributes; raises if an element is not closed in its turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data) -> None:
        self.texts.append(data)


def with_names(report: CompileReport, name: str) -> CompileReport:
    """The report with every text that comes from outside replaced."""
    origin = Origin(name, name, "forward")

    def renamed(items, **more):
        return tuple(dataclasses.replace(item, name=name, origin=origin, **more) for item in items)

    return dataclasses.replace(
        report,
        title=name,
        topology=name,
        mesh=name,
        libtpu_version=name,
        collectives=renamed(report.collectives, warning=name, axes=(name,)),
        operations=renamed(report.operations),
        buffers=renamed(report.buffers, shape=name),
        advice=(name,),
        layout=(name,),
        assumptions=(name,),
    )


@pytest.mark.parametrize("report", [llama_8b_fits(), llama_70b_out_of_memory(), huge()], ids=["fits", "oom", "huge"])
def test_page_needs_nothing_but_itself(report: CompileReport) -> None:
    html = to_html(report, llama_shardings(Mesh(data=4, fsdp=512, tensor=4)))
    page = Page(html)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|XMLHttp", html)
    assert any("default-src 'none'" in value for name, value in page.attributes if name == "content")
    assert len(html) < 1_000_000


@settings(max_examples=30)
@given(reports())
def test_any_report_has_a_well_formed_page(report: CompileReport) -> None:
    Page(to_html(report))


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "\"><b onload='x'>&amp;", "</style></script><!--"])
def test_text_is_text(name: str) -> None:
    plain = Page(to_html(with_names(llama_8b_fits(), "plain"), {"plain": ((64,), NamedSharding(Mesh(x=2), P("x")))}))
    hostile = Page(to_html(with_names(llama_8b_fits(), name), {name: ((64,), NamedSharding(Mesh(x=2), P("x")))}))
    assert hostile.tags == plain.tags
    assert [key for key, _ in hostile.attributes] == [key for key, _ in plain.attributes]
    assert name in hostile.texts


def test_headline_of_what_fits() -> None:
    text = " ".join(Page(to_html(llama_8b_fits())).texts)
    for part in ("Fits", "84.3 GiB free, limit 94.7 GiB", "predicted step time 1.83 s", "predicted tokens/s/chip 4,488",
                 "predicted MFU, causal attention 53.3% 59.5% counting full attention", "libtpu 0.0.40"):  # fmt: skip
        assert part in text


def test_what_does_not_fit_has_no_times_and_a_limit_in_the_icicle() -> None:
    html = to_html(llama_70b_out_of_memory())
    assert "18.2 GiB too much" in html
    assert "limit 15.7 GiB" in html
    assert 'class="over"' in html
    assert "Predicted time of a step" not in html
    assert 'class="over"' not in to_html(llama_8b_fits())


def test_every_time_is_said_to_be_predicted() -> None:
    html = to_html(llama_8b_fits())
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert "Predicted time of a step" in titles
    assert "Predicted roofline of a chip" in titles
    assert html.count("<th class=num>predicted</th>") == 2
    assert "Times are predicted, not measured." in html


def test_a_warned_collective_is_shown_however_small_it_is() -> None:
    report = huge()
    small = dataclasses.replace(report.collectives[8], seconds=0.0, exposed_seconds=0.0, warning="gathered by accident")
    html = to_html(dataclasses.replace(report, collectives=(*report.collectives, small)))
    assert "gathered by accident" in html


def nodes(node: Node) -> list[Node]:
    return [node, *(inner for child in node.children for inner in nodes(child))]


@given(reports())
def test_icicle_children_are_as_wide_as_their_parent(report: CompileReport) -> None:
    root = icicle(report)
    assert root.bytes == report.memory.total
    for node in nodes(root):
        assert node.bytes > 0 or node is root
        assert not node.children or sum(child.bytes for child in node.children) == node.bytes


@given(reports())
def test_icicle_holds_every_buffer_once_under_its_kind_and_modules(report: CompileReport) -> None:
    found = []
    for kind in icicle(report).children:
        for node in nodes(kind):
            if node.buffer is not None:
                assert node.buffer.kind == kind.kind
                found.append(node.buffer)
    assert sorted(map(repr, found)) == sorted(repr(buffer) for buffer in report.buffers if buffer.bytes)


def test_icicle_joins_modules_that_have_one_part() -> None:
    activations = next(node for node in icicle(llama_8b_fits()).children if node.kind == "activation")
    assert [node.label for node in activations.children] == ["layers.*", "head", "loss", "smaller ones", "copy.5"]
    assert [node.label for node in activations.children[0].children] == ["while.12", "attention", "mlp"]


def test_a_buffer_is_in_the_modules_of_its_origin() -> None:
    state, activation = llama_8b_fits().buffers[8], llama_8b_fits().buffers[5]
    assert segments(state) == (["layers", "*", "mlp", "w_gate"], "weight.exp_avg")
    assert segments(activation) == (["layers", "*", "mlp", "w_gate"], "fusion.77")


@given(meshes(max_devices=5000), st.integers(8, 300))
def test_mesh_picture_has_at_most_so_many_devices_and_the_corners(mesh: Mesh, most: int) -> None:
    places = shown_places(mesh, most)
    number = 1
    for axis, size in mesh.shape.items():
        assert places[axis][-1] == size - 1
        assert list(places[axis]) == sorted(set(places[axis]))
        number *= len(places[axis])
    assert number == mesh.size if mesh.size <= most else number <= most


@given(st.data())
def test_mesh_data_is_what_the_shardings_say(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_devices=64))
    axes = [*mesh.axis_names, None]
    spec = P(*data.draw(st.permutations(axes)))
    shape = tuple(2 * mesh.axis_size(spec.axes_of(dim)) for dim in range(len(spec)))
    sharding = NamedSharding(mesh, spec)
    picture = mesh_data({"one": (shape, sharding), "same": (shape, sharding)})
    one, same = picture["tensors"]
    assert one["layout"] == same["layout"] == 0
    assert len(picture["devices"]) == mesh.size
    shard = sharding.shard_shape(shape)
    for (device, _, slice_index), tiles in zip(picture["devices"], picture["layouts"][0], strict=True):
        assert slice_index == device // (mesh.size // mesh.num_slices)
        expected = sharding.index_of(device, shape)
        assert [part.start for part in expected] == [tile * size for tile, size in zip(tiles, shard, strict=True)]


@pytest.mark.parametrize(
    "mesh",
    [Mesh(x=1), Mesh(fsdp=64), Mesh(data=2, fsdp=4, tensor=4), Mesh(a=2, b=2, c=2, d=2), Mesh(fsdp=8960)],
    ids=str,
)
def test_every_drawn_device_is_drawn_once(mesh: Mesh) -> None:
    html = to_html(llama_8b_fits(), {"w": ((4, 4), NamedSharding(mesh, P()))})
    embedded = re.search(r'id="meshdata">(.*?)</script>', html)
    assert embedded is not None
    numbers = sorted(int(number) for number in re.findall(r'class="device" data-n="(\d+)"', html))
    assert numbers == list(range(len(json.loads(embedded[1])["devices"])))
    assert len(numbers) <= 256


def test_shardings_on_two_meshes_are_an_error() -> None:
    shardings = {"a": ((8,), NamedSharding(Mesh(x=2), P())), "b": ((8,), NamedSharding(Mesh(x=4), P()))}
    with pytest.raises(ShardingError, match=r"on one mesh.\n  got: Mesh\(x=2\), Mesh\(x=4\)"):
        to_html(llama_8b_fits(), shardings)
