import pytest

from orchestrator.contract.errors import UnplaceableError
from orchestrator.placement.cluster import ClusterView, NodeView
from orchestrator.placement.lanes import Share, check, lacks_nodes, node_shares, place


def cluster(**nodes: tuple[int, int]) -> ClusterView:
    """Nodes by name: devices, and how many of them are free."""
    views = [
        NodeView(name=name, address="10.0.0.1", devices=devices, free_devices=free)
        for name, (devices, free) in nodes.items()
    ]
    return ClusterView(nodes=tuple(views), device_kind="GPU")


def shares(*parts: tuple[str, int]) -> tuple[Share, ...]:
    return tuple(Share(node, devices) for node, devices in parts)


@pytest.mark.parametrize(
    ("world_size", "nodes", "expected"),
    [
        (1, None, shares(("c", 1))),
        (4, None, shares(("b", 4))),
        (8, None, shares(("a", 8))),
        (10, None, shares(("a", 8), ("b", 2))),
        (4, 2, shares(("a", 2), ("b", 2))),
        (2, 2, shares(("a", 1), ("b", 1))),
        (3, 3, shares(("a", 1), ("b", 1), ("c", 1))),
        (8, 1, shares(("a", 8))),
    ],
)
def test_packed_unless_spread(world_size: int, nodes: int | None, expected: tuple[Share, ...]) -> None:
    assert place(cluster(a=(8, 8), b=(4, 4), c=(1, 1)), world_size, nodes) == expected


def test_waits_for_devices_that_others_hold() -> None:
    busy = cluster(a=(2, 1), b=(2, 0))
    assert place(busy, 1, None) == shares(("a", 1))
    assert place(busy, 2, None) is None
    assert place(busy, 2, 2) is None


@pytest.mark.parametrize(
    ("world_size", "nodes", "message"),
    [
        (2, 1, "a trial needs 2 GPUs on one node, the largest node has 1"),
        (3, None, r"a trial needs 3 GPUs, the cluster has 2 GPUs on 2 nodes \(a: 1, b: 1\)"),
        (3, 3, r"a trial needs 3 GPUs spread over 3 nodes alike, the cluster has 2 GPUs on 2 nodes"),
        (2, 3, "resources.nodes is 3 but a trial has only 2 GPUs"),
    ],
)
def test_refuses_with_what_the_cluster_has(world_size: int, nodes: int | None, message: str) -> None:
    with pytest.raises(UnplaceableError, match=message):
        check(cluster(a=(1, 1), b=(1, 0)), world_size, nodes)


def test_dead_nodes_do_not_count() -> None:
    view = cluster(a=(4, 4))
    dead = view.model_copy(update={"nodes": tuple(node.model_copy(update={"is_alive": False}) for node in view.nodes)})
    with pytest.raises(UnplaceableError, match="has 0 GPUs on 0 nodes"):
        check(dead, 1, None)


def test_a_packed_trial_waits_for_the_node_that_holds_it_rather_than_being_spread() -> None:
    assert place(cluster(a=(2, 1), b=(2, 1)), 2, None) is None
    assert place(cluster(a=(2, 1), b=(2, 2)), 2, None) == shares(("b", 2))


def test_more_than_a_node_takes_whole_nodes_first() -> None:
    assert place(cluster(a=(8, 8), b=(8, 8), c=(8, 4)), 12, None) == shares(("a", 8), ("b", 4))
    assert place(cluster(a=(8, 4), b=(8, 4), c=(8, 4)), 12, None) is None


def test_every_node_of_a_spread_trial_gives_the_same_number() -> None:
    view = cluster(a=(4, 4), b=(1, 1))
    with pytest.raises(UnplaceableError, match="4 GPUs spread over 2 nodes alike"):
        check(view, 4, 2)


def test_a_trial_waits_for_nodes_that_an_autoscaler_may_bring() -> None:
    more = tuple(NodeView(name=f"more {number}", address="", devices=4, free_devices=0) for number in range(2))
    view = cluster(a=(1, 1)).model_copy(update={"coming": more})
    check(view, 8, 2)
    assert lacks_nodes(view, 8, 2)
    assert [node_shares(view, *layout) for layout in ((8, 2), (8, None), (9, None))] == [[4, 4], [4, 4], [4, 4, 1]]
    assert not lacks_nodes(view, 1, None)
    assert place(view, 8, 2) is None
    with pytest.raises(UnplaceableError, match="has 1 GPU on 1 node and its autoscaler may add 8 GPUs on 2 nodes"):
        check(view, 16, None)


def test_spread_trials_leave_no_device_idle_that_the_next_could_use() -> None:
    free = {"a": 2, "b": 2, "c": 2}
    for _ in range(3):
        found = place(cluster(**{name: (2, count) for name, count in free.items()}), 2, 2)
        assert found is not None
        for share in found:
            free[share.node] -= share.devices
    assert set(free.values()) == {0}
