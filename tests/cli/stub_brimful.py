"""`brimful` whose ranks follow `pools.stub_template`: for tests of the driver that need no training."""

from orchestrator import wiring
from orchestrator.backends.local_pool import LocalPool
from orchestrator.cli import main

wiring.build_pool = lambda name, address, *rest: LocalPool(devices=2, template_module="pools.stub_template")
main()
