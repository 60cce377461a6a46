"""Groups: what decays, what is trust-scaled, at which share of the rate, and how it is printed."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf
from optim_helpers import list_parameters

from vit_tpu.errors import UserError
from vit_tpu.optim.decay import Parameter, matches, resolve, table


def by_path(groups):
    return {path: group for group in groups for path in group.paths}


def reference_parameters(paths):
    """The reference's parameter names as a model would describe them."""
    listed = []
    for path in paths:
        last = path.split("/")[-1]
        kind = {"kernel": "kernel", "bias": "bias", "scale": "norm", "probe": "token"}.get(last)
        part = "head" if path.startswith("head/") else "body"
        listed.append(Parameter(path, tf.zeros([2, 2]), kind or "posemb", part))
    return listed


def test_decayed_parameters_are_the_papers(refs):
    masks = refs("wd_masks.json")
    heads, bodies = masks["matched"]
    groups = by_path(resolve(reference_parameters([*heads, *bodies, *masks["undecayed"]])))
    assert [path for path, group in groups.items() if group.decay == "head"] == heads
    assert sorted(path for path, group in groups.items() if group.decay == "body") == sorted(bodies)
    undecayed = sorted(path for path, group in groups.items() if group.decay == "none")
    assert undecayed == sorted(masks["undecayed"])


def test_layer_decay_by_depth():
    groups = by_path(resolve(list_parameters(depth=2), layer_decay=0.5))
    scales = {path: group.lr_scale for path, group in groups.items()}
    assert scales["embedding/kernel"] == scales["posemb"] == 0.125
    assert scales["blocks/0/attention/query/kernel"] == 0.25
    assert scales["blocks/1/norm1/scale"] == 0.5
    assert scales["head/kernel"] == scales["map/probe"] == 1.0


def test_layer_decay_of_stacked_blocks_is_one_factor_for_each_slice():
    groups = by_path(resolve(list_parameters(depth=3, stacked=True), layer_decay=0.5))
    assert groups["blocks/attention/query/kernel"].lr_scale == (0.125, 0.25, 0.5)
    assert groups["embedding/kernel"].lr_scale == 0.0625


def test_freezing_by_glob_by_prefix_and_by_part():
    parameters = list_parameters()
    for freeze, some in (
        (["blocks/0"], "blocks/0/norm1/scale"),
        (["blocks/*/bias"], "blocks/1/attention/query/bias"),
        (["posemb"], "posemb"),
        (["body"], "embedding/kernel"),
        (["head"], "head/bias"),
    ):
        groups = by_path(resolve(parameters, freeze=freeze))
        assert groups[some].frozen, freeze
        other = "embedding/bias" if freeze == ["head"] else "head/kernel"
        assert not groups[other].frozen, freeze
    frozen = [g for g in resolve(parameters, freeze=["body"]) if g.frozen]
    assert sum(len(g.parameters) for g in frozen) == sum(p.part == "body" for p in parameters)


@pytest.mark.parametrize(
    ("pattern", "path", "want"),
    [
        ("bias", "a/query/bias", True),
        ("bias", "unbiased/kernel", False),
        ("*bias", "a/query_bias", True),
        ("head/*", "head/kernel", True),
        ("head/*", "map/head/kernel", False),
        ("blocks/1", "blocks/1/norm/scale", True),
        ("blocks/1", "blocks/11/norm/scale", False),
        ("Bias", "a/bias", False),
        ("norm?", "blocks/0/norm1/scale", True),
    ],
)
def test_what_a_pattern_matches(pattern, path, want):
    assert matches(pattern, path) is want


@pytest.mark.parametrize("option", ["freeze", "exclude_from_weight_decay", "exclude_from_layer_adaptation"])
def test_a_pattern_that_matches_nothing_names_the_nearest(option):
    with pytest.raises(UserError, match=re.escape('"posembed" matches no parameter')) as error:
        resolve(list_parameters(), **{option: ["posembed"]})
    assert 'did you mean "posemb"' in str(error.value)
    with pytest.raises(UserError, match="give a list"):
        resolve(list_parameters(), **{option: "posemb"})


def test_exclusions_are_independent():
    groups = by_path(
        resolve(
            list_parameters(),
            exclude_from_weight_decay=["attention"],
            exclude_from_layer_adaptation=["head"],
        )
    )
    query, head = groups["blocks/0/attention/query/kernel"], groups["head/kernel"]
    assert (query.decay, query.trust) == ("none", True)
    assert (head.decay, head.trust) == ("head", False)
    assert groups["norm/scale"].decay == "body" and groups["norm/scale"].trust


def test_other_mistakes_are_named():
    parameters = list_parameters()
    with pytest.raises(UserError, match="layer_decay is 1.5"):
        resolve(parameters, layer_decay=1.5)
    with pytest.raises(UserError, match="names every parameter"):
        resolve(parameters, freeze=["*"])
    with pytest.raises(UserError, match="repeated: head/bias"):
        resolve([*parameters, parameters[-1]])
    with pytest.raises(UserError, match='unknown kind "kernal".*"kernel"'):
        resolve([Parameter("a", tf.zeros([1]), "kernal")])


@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.7}, {"freeze": ["posemb", "blocks"]}])
def test_table_totals_equal_the_parameter_count(options):
    parameters = list_parameters()
    groups = resolve(parameters, **options)
    text = table(groups, weight_decay=0.03, head_weight_decay=3.0)
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    head = ["group", "variables", "parameters", "weight decay", "trust ratio", "lr scale"]
    assert rows[0] == head
    counts = [[int(cell.replace(",", "")) for cell in row[1:3]] for row in rows[1:]]
    total = sum(math.prod(p.variable.shape) for p in parameters)
    assert counts[-1] == [len(parameters), total]
    assert np.sum(counts[:-1], axis=0).tolist() == counts[-1]
    assert any(row[3] == "3" for row in rows[1:-1]) and "0.03" in text
    assert ("frozen" in text) == ("freeze" in options)


def test_order_of_the_groups_is_that_of_the_model():
    parameters = list_parameters()
    groups = resolve(parameters)
    assert sorted(place for group in groups for place in group.positions) == list(range(len(parameters)))
    for group in groups:
        assert [parameters[place] for place in group.positions] == list(group.parameters)
