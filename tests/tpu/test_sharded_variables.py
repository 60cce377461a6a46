"""Every weight, moment and average is read and assigned as it is meant to lie, and so is the batch.

Numbers do not tell, and bytes not always: what has no annotation, XLA's partitioner often lays out like its neighbours.
"""

import pytest

from vit_tpu import config as configs
from vit_tpu import mesh as meshes
from vit_tpu.layers import sharding
from vit_tpu.tpu import trace

COMMON = {
    "model": {"variant": "Ti/4", "image_size": 8, "depth": 1, "width": 128, "mlp_dim": 64, "num_heads": 4,
              "pool": "gap", "num_classes": 8},
    "data": {"source": "synthetic", "classes": 8},
    "training": {"steps": 10, "batch_size": 16, "ema": 0.9, "board": "full"},
}  # fmt: skip
CASES = {
    "lamb, full, micro-batches": ("full", {"optimizer.name": "lamb", "training.accumulation_steps": 2}),
    "adafactor, state, scan": ("state", {"optimizer.name": "adafactor", "model.scan": True, "model.depth": 2}),
    "frozen": ("full", {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.freeze": ["embedding/*"]}),
}


def traced(shard, changes):
    config = configs.from_dict({**COMMON, "mesh": "data=4,model=2", "shard": shard})
    for key, value in changes.items():
        config = configs.replace(config, key, value)
    step = trace.Step(configs.validate(config))
    function, specs = step.function(16)
    return step, function.get_concrete_function(*specs).graph


def places(step):
    """Variable's name -> how it is to lie."""
    optimizer, mesh = step.model.inner_optimizer, step.model.mesh
    layouts = sharding.layouts(step.model.parameters(), mesh)
    found = {path: layout.stored for path, layout in layouts.items()}
    for slot, variables in optimizer.slots.items():
        for p in step.model.trained:
            if p.path in variables:
                found[f"{slot}/{p.path}"] = optimizer.place(slot, optimizer.rule(p.variable))
    if step.model.averages is not None:
        found |= {f"ema/{p.path}": layouts[p.path].state for p in step.model.trained}
    return found


def uses(graph, names):
    """(variable's name, "read" or "assigned", operations next to it) for what the graph and its loops do."""
    found = []
    for op in graph.get_operations():
        name = names.get(op.inputs[0].name) if op.inputs else None
        if op.type == "ReadVariableOp" and name is not None:
            # A custom gradient also passes its argument through an IdentityN, whose outputs nothing uses.
            found.append((name, "read", [c for c in op.outputs[0].consumers() if c.type != "IdentityN"]))
        elif op.type == "AssignVariableOp" and name is not None:
            found.append((name, "assigned", [op.inputs[1].op]))
        elif op.type in ("While", "StatelessWhile"):
            inner = graph._get_function(op.get_attr("body").name).graph
            given = {i.name: names[o.name] for i, o in zip(inner.inputs, op.inputs) if o.name in names}
            found += uses(inner, given)
        else:
            # Nothing else may touch a variable.
            assert name is None or op.type in ("Identity", "IdentityN"), (op.type, name)
    return found


@pytest.mark.parametrize("case", CASES)
def test_variables_are_read_and_assigned_as_they_are_to_lie(case, monkeypatch):
    monkeypatch.setattr(meshes, "SMALLEST", 64)
    step, graph = traced(*CASES[case])
    lie = places(step)
    known = {id(variable.handle): name for name, (variable, _) in step.variables().items()}
    names = {inner.name: known[id(outer)] for outer, inner in graph.captures if id(outer) in known}
    seen = set()
    for name, how, operations in uses(graph, names):
        wanted = sharding.annotation(lie[name], step.model.mesh).proto.SerializeToString()
        for op in operations:
            assert op.type == "XlaSharding", (name, how, op.name)
            assert op.get_attr("sharding") == wanted, (name, how, lie[name])
        seen.add((name, how))
    for batch in graph.inputs[:3]:
        divided = sharding.annotation(("data", *[None] * (len(batch.shape) - 1)), step.model.mesh).proto
        [op] = batch.consumers()
        while op.type == "Reshape":
            [op] = op.outputs[0].consumers()
        assert op.type == "XlaSharding" and op.get_attr("sharding") == divided.SerializeToString(), batch.name
    frozen = {p.path for p in step.model.parameters()} - {p.path for p in step.model.trained}
    assert bool(frozen) == (case == "frozen")
    for name in lie:
        assert (name, "read") in seen and ((name, "assigned") in seen) == (name not in frozen), name
