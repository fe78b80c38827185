from orchestrator.placement.environment import rank_environment, template_environment

DRIVER = {
    "PATH": "/usr/bin",
    "HF_HOME": "/models",
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN": "secret",
    "RAY_AUTH_TOKEN": "secret",
    "MLFLOW_TRACKING_PASSWORD": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cuda",
}


def test_what_a_trial_may_see_is_listed() -> None:
    environment = template_environment(DRIVER, None, threads_per_device=4)
    assert "secret" not in environment.values()
    assert {name: environment[name] for name in ("PATH", "HF_HOME", "NCCL_DEBUG")} == {
        "PATH": "/usr/bin",
        "HF_HOME": "/models",
        "NCCL_DEBUG": "INFO",
    }


def test_a_cpu_slot_hides_every_gpu_and_says_its_threads() -> None:
    environment = template_environment(DRIVER, None, threads_per_device=4)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DS_ACCELERATOR"]) == ("", "cpu")
    assert environment["OMP_NUM_THREADS"] == "4"


def test_a_gpu_is_the_only_one_that_its_template_sees() -> None:
    environment = template_environment(DRIVER, "GPU-1b2c", threads_per_device=4)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1b2c"
    assert environment["DS_ACCELERATOR"] == "cuda"


def test_a_ranks_threads_are_said_outright() -> None:
    assert rank_environment(3, 2, is_one_node=False) == {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}
    assert rank_environment(3, 2, is_one_node=True)["GLOO_SOCKET_IFNAME"] == "lo"
