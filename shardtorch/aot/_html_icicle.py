"""HBM at the step's peak as an icicle: by kind, then by module, then by buffer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from shardtorch.aot._quantities import bytes_text, share_text
from shardtorch.aot._report import Buffer, CompileReport

KIND_NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "batch": "batch, metrics",
    "activation": "activations, temporaries",
    "code": "program",
}
_ROW_PX = 30


@dataclass
class Node:
    """A box of the icicle: `bytes` wide, and its children side by side under it."""

    label: str
    kind: str
    """Of its buffers; empty for the root."""
    path: str = ""
    """What it is in full, such as `layers.*.mlp`."""
    bytes: int = 0
    buffer: Buffer | None = None
    """Of a leaf that stands for one."""
    children: list["Node"] = field(default_factory=list)


def icicle(report: CompileReport) -> Node:
    """The tree of HBM at the peak.

    Every node is as wide as its children together. What a kind holds besides the buffers that the report lists is a
    leaf of its own. A module with one part only is joined with it, so `layers` and `*` are one node `layers.*`.

    Args:
      report: Its buffers are pieces of its memory. Should those of a kind be more than the memory has for it, the kind
        is as wide as they are.
    """
    root = Node("HBM in use", "")
    for kind, num_bytes in report.memory.by_kind().items():
        node = Node(KIND_NAMES[kind], kind, KIND_NAMES[kind])
        buffers = [buffer for buffer in report.buffers if buffer.kind == kind and buffer.bytes]
        for buffer in buffers:
            _insert(node, buffer)
        listed = sum(buffer.bytes for buffer in buffers)
        if num_bytes > listed and buffers:
            node.children.append(Node("smaller ones", kind, f"{node.path} besides those listed", num_bytes - listed))
        node.bytes = max(num_bytes, listed)
        node.children = [_joined(child) for child in node.children]
        if node.bytes:
            root.children.append(node)
    root.bytes = sum(child.bytes for child in root.children)
    _sort(root)
    return root


def segments(buffer: Buffer) -> tuple[list[str], str]:
    """The modules that a buffer is in, outermost first, and what it is called there.

    >>> segments(Buffer("layers.*.mlp.w_up.weight", "parameter", 8, "bf16[4]"))
    (['layers', '*', 'mlp', 'w_up'], 'weight')
    """
    module = buffer.origin.module
    if not module and buffer.kind in ("parameter", "gradient", "optimizer"):
        module = buffer.name.rpartition(".")[0]
    label = buffer.name.removeprefix(f"{module}.") if module else buffer.name
    return [part for part in module.split(".") if part], label


def render_icicle(report: CompileReport) -> str:
    """The gauge of HBM, and under it the icicle of what is in use, as HTML."""
    memory, root = report.memory, icicle(report)
    boxes = "".join(_boxes(root, 0, 0, root))
    depth = _depth(root)
    over = ""
    if root.bytes > memory.limit:
        left = 100 * memory.limit / root.bytes
        over = (
            f'<div class="over" style="left:{left:.3f}%" title="beyond the limit"></div>'
            f'<div class="wall" style="left:{left:.3f}%"><b>limit {bytes_text(memory.limit)}</b></div>'
        )
    return (
        f"{_gauge(report, root.bytes)}"
        f'<div class="icicle" id="icicle" style="height:{depth * _ROW_PX}px">{boxes}{over}</div>'
        '<p class="note">Wide is much. Point at a box for its size, shape and source; click to zoom in, click the top '
        "row to zoom out.</p>"
    )


def _gauge(report: CompileReport, used: int) -> str:
    """The whole of HBM with what is used of it, and lines from there to the icicle's corners."""
    limit = report.memory.limit
    scale = max(limit, used)
    parts, start = [], 0.0
    for kind, num_bytes in report.memory.by_kind().items():
        width = 100 * num_bytes / scale
        parts.append(
            f'<i class="k-{kind}" style="left:{start:.3f}%;width:{width:.3f}%" '
            f'title="{KIND_NAMES[kind]}: {bytes_text(num_bytes)}"></i>'
        )
        start += width
    if report.memory.headroom >= 0:
        left = f'<span class="free" style="left:{start:.3f}%">{bytes_text(report.memory.headroom)} free</span>'
        # Behind a long bar there is no room for it; the line above says it too.
        label = left if start < 85 else ""
        state = f"{bytes_text(used)} used of {bytes_text(limit)} ({share_text(used, limit)})"
    else:
        wall = 100 * limit / scale
        label = f'<i class="over" style="left:{wall:.3f}%;right:0"></i><i class="wall" style="left:{wall:.3f}%"></i>'
        state = (
            f"{bytes_text(used)} needed, {bytes_text(limit)} there: "
            f'<b class="bad">{bytes_text(used - limit)} too much</b>'
        )
    end = 100 * used / scale
    funnel = (
        f'<svg class="funnel" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<polygon points="0,0 {end:.3f},0 100,10 0,10"/></svg>'
    )
    legend = "".join(
        f'<span><i class="k-{kind}"></i>{KIND_NAMES[kind]} <b>{bytes_text(num_bytes)}</b></span>'
        for kind, num_bytes in report.memory.by_kind().items()
    )
    bar = f'<div class="gauge">{"".join(parts)}{label}</div>'
    return f'<p class="state">{state}</p><div class="legend">{legend}</div>{bar}{funnel}'


def _boxes(node: Node, start: int, depth: int, root: Node) -> Iterator[str]:
    left, width = (value / root.bytes if root.bytes else 0 for value in (start, node.bytes))
    yield (
        f'<div class="box k-{node.kind or "root"}" style="--l:{left:.6g};--w:{width:.6g};--d:{depth}" '
        f'title="{escape(_hover(node, root))}">'
        f"<span>{escape(node.label)}</span> <em>{bytes_text(node.bytes)}</em></div>"
    )
    for child in node.children:
        yield from _boxes(child, start, depth + 1, root)
        start += child.bytes


def _hover(node: Node, root: Node) -> str:
    lines = [
        node.path or node.label,
        f"{bytes_text(node.bytes)}, {share_text(node.bytes, root.bytes)} of what is in use",
    ]
    if node.buffer is not None:
        origin = node.buffer.origin
        lines += [f"{node.buffer.kind} {node.buffer.shape}", " ".join(filter(None, (origin.source, origin.phase)))]
    return "\n".join(filter(None, lines))


def _insert(node: Node, buffer: Buffer) -> None:
    modules, label = segments(buffer)
    for end in range(1, len(modules) + 1):
        node.bytes += buffer.bytes
        path = ".".join(modules[:end])
        inner = next((child for child in node.children if child.path == path and child.buffer is None), None)
        if inner is None:
            inner = Node(modules[end - 1], buffer.kind, path)
            node.children.append(inner)
        node = inner
    node.bytes += buffer.bytes
    node.children.append(Node(label, buffer.kind, buffer.name, buffer.bytes, buffer))


def _joined(node: Node) -> Node:
    """The node with every module that has one module in it, and nothing else, joined with that."""
    while len(node.children) == 1 and node.children[0].buffer is None:
        (child,) = node.children
        node = Node(f"{node.label}.{child.label}", child.kind, child.path, child.bytes, None, child.children)
    node.children = [_joined(child) for child in node.children]
    return node


def _sort(node: Node) -> None:
    """Largest first within a module; the kinds keep their order."""
    for child in node.children:
        child.children.sort(key=lambda inner: -inner.bytes)
        _sort(child)


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, node.children), default=0)
