"""Draws docs/packages.svg, the packages and who may import whom: python docs/packages.py"""

from pathlib import Path

# from the top; a package imports only from those below it
FLOORS = [
    {"commands": "python -m straggle train, compare, advise, ..."},
    {"lab": "faults, workloads, the simulator"},
    {"advise": "which rank is slow, what a policy is worth"},
    {"integrations": "transformers, Accelerate, Lightning"},
    {"observe": "trace, metrics, the page of a run, watch"},
    {"data": "which samples each rank has"},
    {"parallel, building": "the wrapped model, of the core and the wings that its arguments ask for"},
    {
        "members": "ranks that return",
        "pools": "micro-batches",
        "links": "pings",
        "replay": "a run again",
        "stuck": "who hangs",
    },
    {"step, loop": "a step of a training loop"},
    {"merge": "rounds, buffers, coordinator, stand-in, rows"},
    {"source": "where gradients come from: replicated, sharded"},
    {"backward": "one process's pass: stages, hooks, clocks"},
    {"policies": "deadlines, estimators, and what they see"},
    {"report": "what happened in a step"},
]
CORE = {"step, loop", "merge", "source", "backward"}
WINGS = {"members", "pools", "links", "replay", "stuck"}
WIDTH, HEIGHT, GAP = 760, 42, 6
STYLE = """
    .page { fill: #ffffff } .name { fill: #1f2328; font-weight: 600 } .text { fill: #59636e }
    .other { fill: #eef1f4 } .core { fill: #cfe6d7 } .wing { fill: #e2daf5 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .name { fill: #e6edf3 } .text { fill: #9da7b1 }
      .other { fill: #21262d } .core { fill: #1d3d2b } .wing { fill: #352a55 }
    }"""


def kind_of(name):
    return "core" if name in CORE else "wing" if name in WINGS else "other"


def boxes():
    """One rectangle for each package, with its name and what it is for."""
    for floor, packages in enumerate(FLOORS):
        width = (WIDTH - GAP * (len(packages) + 1)) / len(packages)
        y = GAP + floor * (HEIGHT + GAP)
        for place, (name, text) in enumerate(packages.items()):
            x = GAP + place * (width + GAP)
            yield f'  <rect class="{kind_of(name)}" x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="6"/>'
            if len(packages) > 1:
                yield f'  <text class="name" x="{x + 10:g}" y="{y + 18}">{name}</text>'
                yield f'  <text class="text" x="{x + 10:g}" y="{y + 34}">{text}</text>'
            else:
                yield f'  <text class="name" x="{x + 10:g}" y="{y + 26}">{name}</text>'
                yield f'  <text class="text" x="{x + 170:g}" y="{y + 26}">{text}</text>'


def picture():
    height = GAP + len(FLOORS) * (HEIGHT + GAP)
    font = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    head = f'{head}\n     aria-label="The packages" font-family="{font}" font-size="13">'
    page = f'  <rect class="page" width="{WIDTH}" height="{height}" rx="8"/>'
    return "\n".join([head, f"  <style>{STYLE}\n  </style>", page, *boxes(), "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("packages.svg").write_text(picture())
