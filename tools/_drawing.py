"""A part of a graph as an SVG picture: nodes in layers from top to bottom, edges as curves between them.

In: `GraphNode`s of one section. Out: SVG text whose colours are CSS variables. Nodes that compute nothing are left out, weights
stand in the nodes that read them, inputs and caches are nodes of their own.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from ._record import GraphNode, GraphTrace

WIDE, LEAF, THIN, H, GAP_X, GAP_Y = 186, 112, 8, 38, 12, 24
LONG = 5                            # ranks; an edge over more passes beside the others
KINDS = {"mul_mat": "product", "mul_mat_id": "product", "flash_attn_ext": "attention", "soft_max": "attention", "rope": "rope",
         "set_rows": "memory", "get_rows": "memory", "cpy": "memory", "rms_norm": "norm", "norm": "norm", "l2_norm": "norm",
         "group_norm": "norm", "ssm_conv": "recurrent", "ssm_scan": "recurrent", "gated_delta_net": "recurrent",
         "rwkv_wkv6": "recurrent", "rwkv_wkv7": "recurrent", "gated_linear_attn": "recurrent"}


def kind(op: str) -> str:
    """What sort of work an op is, by which it is coloured."""
    return KINDS.get(op, "element")


@dataclass
class Box:
    """Something drawn: a node, a leaf, or a bend of a long edge. `x` is its middle."""
    key: str
    title: str = ""
    text: str = ""
    style: str = "bend"
    rank: int = 0
    x: float = 0.0
    aside: int = 0
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        return THIN if self.style == "bend" else LEAF if self.style in ("leaf", "cache") else WIDE


def sections(graph: GraphTrace) -> list[tuple[str, list[GraphNode]]]:
    """The input, each form that layers have (with those that have it), the output."""
    layers: dict[int, list[GraphNode]] = {}
    outside: list[list[GraphNode]] = [[], []]
    for n in graph.nodes:
        if n.layer is None:
            outside[bool(layers)].append(n)
        else:
            layers.setdefault(n.layer, []).append(n)
    forms: dict[tuple[object, ...], list[int]] = {}
    for il, nodes in layers.items():
        forms.setdefault(tuple((n.op, n.type, *n.ne) for n in nodes), []).append(il)
    found = [("Input", outside[0])] if outside[0] else []
    for same in forms.values():
        found.append((f"Layer {same[0]}" + (f", and {len(same) - 1} like it" if len(same) > 1 else ""), layers[same[0]]))
    return found + ([("Output", outside[1])] if outside[1] else [])


def drawing(graph: GraphTrace, section: Sequence[GraphNode]) -> str:
    """The section as an SVG element."""
    boxes, edges = gather(graph, section)
    rank(boxes, edges)
    rows = lay(boxes, edges)
    place(rows, boxes)
    return paint(rows, boxes, edges)


Edge = tuple[str, str, bool]                # from, to, through memory


def gather(graph: GraphTrace, section: Sequence[GraphNode]) -> tuple[dict[str, Box], list[Edge]]:
    boxes: dict[str, Box] = {}
    edges: list[Edge] = []
    inside = {n.id for n in section}
    written: dict[str, str] = {}
    for n in (n for n in section if not n.view):
        weights = []
        for s in n.src:
            end = through(graph, s)
            if isinstance(end, str) and end in written and n.op != "set_rows":
                edges.append((written[end], str(n.id), True))
            elif isinstance(end, str) and is_weight(end):
                weights.append(end)
            elif isinstance(end, str) and n.op == "set_rows" and s == n.src[0]:
                written[end] = str(n.id)
            else:
                key = end if isinstance(end, str) else str(end)
                if key not in boxes:
                    boxes[key] = leaf(graph, end, end in inside)
                edges.append((key, str(n.id), False))
        title = n.name or next((f"→ {name}" for name, by in written.items() if by == str(n.id)), n.op)
        reads = f" · {short(weights[0])}" if weights else ""
        boxes[str(n.id)] = Box(str(n.id), title, f"{n.op} {'×'.join(n.ne)}{reads}", kind(n.op))
    return boxes, list(dict.fromkeys(edges))


def through(graph: GraphTrace, s: int | str) -> int | str:
    """What has the bytes behind views."""
    while isinstance(s, int) and graph.nodes[s].view:
        s = graph.nodes[s].src[0]
    return s


def is_weight(name: str) -> bool:
    return "." in name


def short(name: str) -> str:
    """blk.0.attn_q.weight as attn_q"""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] if name.startswith("blk.") else name.removesuffix(".weight")


def leaf(graph: GraphTrace, end: int | str, inside: bool) -> Box:
    if isinstance(end, str):
        return Box(end, end, "cache" if end.startswith("cache_") else "input", "cache" if end.startswith("cache_") else "leaf")
    n = graph.nodes[end]
    return Box(str(end), n.name or n.op, "from before", "leaf") if not inside else Box(str(end))


def rank(boxes: Mapping[str, Box], edges: Iterable[Edge]) -> None:
    """Ranks by the longest way from the top; what nothing feeds stands right above its first reader."""
    into: dict[str, list[str]] = {}
    out: dict[str, list[str]] = {}
    for a, b, _ in edges:
        into.setdefault(b, []).append(a)
        out.setdefault(a, []).append(b)
    todo = sorted(boxes, key=lambda k: (not (not k.isdigit() or k not in into), int(k) if k.isdigit() else -1))
    for key in todo:
        boxes[key].rank = max((boxes[a].rank + 1 for a in into.get(key, ())), default=0)
    for key in boxes:
        if key not in into and key in out:
            boxes[key].rank = min(boxes[b].rank for b in out[key]) - 1


def lay(boxes: dict[str, Box], edges: Sequence[Edge]) -> list[list[str]]:
    """Rows of boxes, with a bend wherever an edge passes a row; ordered so that few edges cross. Long edges pass at the right,
    the longest outside."""
    for i, (a, b, _) in enumerate(edges):
        before, span = a, boxes[b].rank - boxes[a].rank
        for r in range(boxes[a].rank + 1, boxes[b].rank):
            key = f"bend {i} {r}"
            boxes[key] = Box(key, rank=r, aside=span if span > LONG else 0)
            link(boxes, before, key)
            before = key
        link(boxes, before, b)
    low = min(b.rank for b in boxes.values())
    rows: list[list[str]] = [[] for _ in range(max(b.rank for b in boxes.values()) - low + 1)]
    for key, box in boxes.items():
        box.rank -= low
        rows[box.rank].append(key)
    for turn in range(8):
        down = turn % 2 == 0
        for row in rows if down else reversed(rows):
            at = {key: i for other in rows for i, key in enumerate(other)}
            row.sort(key=lambda k: (boxes[k].aside, mean([at[n] for n in (boxes[k].above if down else boxes[k].below)], at[k])))
    return rows


def link(boxes: Mapping[str, Box], a: str, b: str) -> None:
    boxes[a].below.append(b)
    boxes[b].above.append(a)


def mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default


def place(rows: Sequence[Sequence[str]], boxes: Mapping[str, Box]) -> None:
    """Middles: side by side, then moved towards what they are connected with."""
    for row in rows:
        x = 0.0
        for key in row:
            boxes[key].x = x + boxes[key].width / 2
            x += boxes[key].width + GAP_X
        for key in row:
            boxes[key].x -= x / 2
    for turn in range(40):
        for row in rows if turn % 2 == 0 else reversed(rows):
            spread(row, boxes, [wish(boxes, boxes[k].above + boxes[k].below, boxes[k]) for k in row])
    for row in rows[1:]:                # chains hang straight below what they come from
        spread(row, boxes, [wish(boxes, boxes[k].above or boxes[k].below, boxes[k]) for k in row])


def wish(boxes: Mapping[str, Box], neighbours: Sequence[str], box: Box) -> float:
    """Where a box would like to be: near these neighbours, of which those of its own kind count most, so that long edges run
    straight and do not pull what they pass."""
    ends = [boxes[n] for n in neighbours]
    weights = [1.0 if (e.style == "bend") == (box.style == "bend") else 0.01 for e in ends]
    return sum(w * e.x for w, e in zip(weights, ends)) / sum(weights) if ends else box.x


def spread(row: Sequence[str], boxes: Mapping[str, Box], wish: Sequence[float]) -> None:
    """As near to their wishes as the order and the gaps allow: pushed from the left, then from the right, and the mean of both."""
    need = [(boxes[a].width + boxes[b].width) / 2 + GAP_X for a, b in pairwise(row)]
    left, right = list(wish), list(wish)
    for i, gap in enumerate(need):
        left[i + 1] = max(left[i + 1], left[i] + gap)
    for i, gap in reversed(list(enumerate(need))):
        right[i] = min(right[i], right[i + 1] - gap)
    for key, a, b in zip(row, left, right):
        boxes[key].x = (a + b) / 2


def paint(rows: Sequence[Sequence[str]], boxes: Mapping[str, Box], edges: Sequence[Edge]) -> str:
    left = min(b.x - b.width / 2 for b in boxes.values()) - 4
    width = max(b.x + b.width / 2 for b in boxes.values()) - left + 4
    height = len(rows) * (H + GAP_Y)
    out = [f'<svg class="graph" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">']
    memory = {(a, b) for a, b, through_memory in edges if through_memory}
    for box in boxes.values():
        for b in box.below if box.style != "bend" else ():
            out.append(curve(boxes, box, boxes[b], left, memory))
    for box in boxes.values():
        if box.style != "bend":
            out.append(rectangle(box, left))
    return "".join([*out, "</svg>"])


def top(box: Box) -> float:
    return box.rank * (H + GAP_Y) + 4


def curve(boxes: Mapping[str, Box], a: Box, b: Box, left: float, memory: set[tuple[str, str]]) -> str:
    x, y = a.x - left, top(a) + H
    path = f"M{x:.0f} {y:.0f}"
    while True:
        x2, y2 = b.x - left, top(b)
        path += f"C{x:.0f} {y + GAP_Y / 2:.0f} {x2:.0f} {y2 - GAP_Y / 2:.0f} {x2:.0f} {y2:.0f}"
        if b.style != "bend":
            break
        x, y = x2, y2 + H
        path += f"L{x:.0f} {y:.0f}"
        b = boxes[b.below[0]]
    return f'<path class="edge{" memory" if (a.key, b.key) in memory else ""}" d="{path}"/>'


def rectangle(box: Box, left: float) -> str:
    x, y = box.x - box.width / 2 - left, top(box)
    shown, text = escape(cut(box.title, (box.width - 16) // 6.7)), escape(cut(box.text, (box.width - 16) // 5.8))
    return (f'<g class="box {box.style}"><title>{escape(box.title)}: {escape(box.text)}</title>'
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{box.width}" height="{H}" rx="6"/>'
            f'<text x="{x + 9:.0f}" y="{y + 16:.0f}" class="name">{shown}</text>'
            f'<text x="{x + 9:.0f}" y="{y + 30:.0f}" class="what">{text}</text></g>')


def cut(text: str, n: float) -> str:
    """At most n characters."""
    return text if len(text) <= n else text[:int(n) - 1] + "…"
