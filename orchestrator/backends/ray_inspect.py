"""Asking every node of a Ray cluster what it has, by a small task on each."""

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.ray_connect import join
from orchestrator.backends.ray_view import device_shape, living_nodes
from orchestrator.contract.errors import BrimfulError, ClusterUnreachableError
from orchestrator.placement.inspected import InspectedNode
from orchestrator.placement.node_facts import node_facts

ANSWER_DEADLINE_S = 60.0
"""A worker starts in seconds; a node that is full of others' work may take longer."""


def inspected_nodes(address: str) -> list[InspectedNode]:
    """All living nodes of the cluster at `address`.

    Raises ClusterUnreachableError where it cannot be joined or a node does not answer, BrimfulError where a node
    answers with an error.
    """
    connection = join(address)
    try:
        nodes = living_nodes()
        shape = device_shape(nodes, threads_per_device=1)
        # neither a CPU nor a GPU is taken: nodes whose devices are all in use answer too
        ask = ray.remote(num_cpus=0, max_retries=0)(node_facts)
        answers = [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False)).remote()
            for node in nodes
        ]
        _, silent = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_DEADLINE_S)
        if silent:
            names = ", ".join(node.name for node, answer in zip(nodes, answers, strict=True) if answer in silent)
            raise ClusterUnreachableError(f"no answer within {ANSWER_DEADLINE_S:.0f} s from {names}")
        return [
            InspectedNode(name=node.name, devices=shape.count(node.resources), facts=ray.get(answer))
            for node, answer in zip(nodes, answers, strict=True)
        ]
    except ray.exceptions.RayError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise BrimfulError(f"a node of the cluster at {address} could not be inspected: {last_line}") from error
    finally:
        connection.close()
